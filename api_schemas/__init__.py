"""The wire: what travels over HTTP, in pydantic and the standard library alone."""
