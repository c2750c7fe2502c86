"""Composition root, the one place that knows all services: `pagewire up`, `serve`, `ps`, `chat`, `pull`, `bench`."""
