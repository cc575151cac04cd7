"""Sessions: several traces as one, with values flowing from one to the next."""

from __future__ import annotations

from nnsight_engine.tracing.tracer import Tracer


class Session(Tracer):
    """``with model.session():``; the block runs as plain code, its traces one after the other.

    The traces share the session's variables, so what one assigned the next can use without saving it. What
    is to outlive the session is saved.
    """
