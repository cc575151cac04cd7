"""The local engine: a ``LanguageModel`` in a process of its own, for traces that vLLM cannot run."""

from __future__ import annotations

from collections.abc import Mapping

from app.engine.trace_processes import TraceProcesses
from app.settings import Settings
from nnsight_engine.local_engine.link import ProcessOptions


class LocalTraceEngine(TraceProcesses):
    """Runs traces and sessions of ``LanguageModel``, one at a time.

    Args:
        options: The model, and where it goes.
        settings: The server's.
        environment: Of the process.
    """

    name = "local"
    purpose = "the local engine"
    starts_ahead = True

    def __init__(self, options: ProcessOptions, settings: Settings, environment: Mapping[str, str]) -> None:
        """Start nothing yet."""
        super().__init__("nnsight_engine.local_engine.process", options, settings, environment)


__all__ = ["LocalTraceEngine"]
