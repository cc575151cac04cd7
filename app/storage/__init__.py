"""What the server keeps beyond one request."""
