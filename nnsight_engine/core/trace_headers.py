"""The W3C trace context (distributed tracing) of the running code.

The request handler sets it in its context where spans are recorded. The engine passes it on with the work
that it does for the request, so that the engine's spans belong to the same distributed trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

TRACE_HEADERS: Final[ContextVar[Mapping[str, str] | None]] = ContextVar(
    "nnsight_engine_trace_headers", default=None
)
"""``traceparent``, and ``tracestate`` where there is one; None where no spans are recorded."""

__all__ = ["TRACE_HEADERS"]
