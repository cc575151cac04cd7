"""The backend that runs a block here and now."""

from nnsight_engine.tracing.tracer import ExecutionBackend

__all__ = ["ExecutionBackend"]
