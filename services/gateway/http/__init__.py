"""HTTP: routes, error shape, response shapes, server-sent events."""
