"""Request bodies: what clients may send, checked field by field, and the submissions that it becomes."""
