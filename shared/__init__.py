"""What two services must agree on: messages, names, errors, transport. Imports no service and no torch."""
