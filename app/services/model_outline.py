"""The description of the model for clients that write blocks without loading it."""

from __future__ import annotations

from collections.abc import Sequence

from api_schemas.traces import TraceOutline
from app.engine.client import EngineClient


async def model_outline(engine: EngineClient, engines: Sequence[str]) -> TraceOutline:
    """Return the modules as vLLM has them, and the standard points.

    Args:
        engine: The engine, which must be ready.
        engines: The names of the trace engines.
    """
    served, described = engine.served(), await engine.describe_model()
    return TraceOutline(
        model=served.names[0],
        names=list(served.names),
        fingerprint=served.fingerprint,
        engines=list(engines),
        class_name=described.outline[0][1],
        outline=described.outline,
        spec=described.spec,
    )
