"""Conversion of ``with`` blocks to functions that run later: source, compilation, shared variables."""
