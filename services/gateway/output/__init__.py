"""What a client sees: a pure function of a request's record and its committed tokens."""
