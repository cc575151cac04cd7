"""The kinds of trace, and what their backends need."""

from nnsight_engine.intervention.tracing import (
    backwards,
    base,
    editing,
    globals,
    invoker,
    iterator,
    tracer,
    util,
)

__all__ = ["backwards", "base", "editing", "globals", "invoker", "iterator", "tracer", "util"]
