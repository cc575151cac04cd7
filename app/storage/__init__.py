"""Persistent and temporary storage of data that outlives a request."""
