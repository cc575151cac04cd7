"""Declarative operations: checked once, sent as data, fused over the requests of a step."""
