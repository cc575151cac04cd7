"""The schemas of the HTTP API; depends on pydantic and the standard library only."""
