"""Traces: which are admitted, which engine runs them, and their answers over HTTP."""
