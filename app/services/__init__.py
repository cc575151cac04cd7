"""What the server does between a route and the engine."""
