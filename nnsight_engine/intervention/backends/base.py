"""What a backend of one's own derives from."""

from nnsight_engine.tracing.tracer import Backend

__all__ = ["Backend"]
