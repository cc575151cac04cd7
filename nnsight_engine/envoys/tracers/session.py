from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_engine.tracing.tracer import Backend, Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


class Session(Tracer):
    """``with model.session():``; the block runs as plain code, its traces one after the other.

    The traces share the session's variables, so that a trace can use the values of earlier ones without
    saving them. Values that are used after the session must be saved.
    """

    shares_all = True

    def __init__(self, model: Envoy, *, backend: Backend | None = None) -> None:
        super().__init__(backend=backend)
        self.model = model
