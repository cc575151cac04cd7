"""The HTTP routes, one module per resource; a route reads the request and calls a service."""
