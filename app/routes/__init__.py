"""One file per resource; a route reads the request and hands it to a service."""
