"""Steering vectors that the server keeps: read from files, trained from prompts, used by name."""
