"""The server's logic between the routes and the engine."""
