"""Which distributed trace the running code is a part of, as W3C's headers say it.

Whoever serves a request sets it in its context, where traces are kept; the engine hands it on with what the
request has it do, so that its own spans are of the same trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

TRACE_HEADERS: Final[ContextVar[Mapping[str, str] | None]] = ContextVar(
    "nnsight_engine_trace_headers", default=None
)
"""``traceparent``, and ``tracestate`` where there is one; None where no trace is kept."""

__all__ = ["TRACE_HEADERS"]
