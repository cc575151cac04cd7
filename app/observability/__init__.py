"""Observability of a server: metrics, logs, spans."""
