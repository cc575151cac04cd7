"""The engine interfaces that the server depends on, and their implementations."""
