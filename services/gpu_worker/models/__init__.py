"""Models: configuration, weights and the forward pass."""
