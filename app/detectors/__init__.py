"""Detectors stored on the server: read from files, trained from prompts, used by name."""
