"""The HTTP gateway: everything that is text. Imports no torch."""
