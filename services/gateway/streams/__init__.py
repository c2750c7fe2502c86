"""From the step log to the responses: one reader, one channel per request."""
