"""What every trace derives from."""

from nnsight_engine.tracing.errors import WithBlockNotFoundError
from nnsight_engine.tracing.tracer import Info, Tracer

__all__ = ["Info", "Tracer", "WithBlockNotFoundError"]
