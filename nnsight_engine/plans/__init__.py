"""Declarative operations: validated once, sent as data, batched over the requests of a step."""
