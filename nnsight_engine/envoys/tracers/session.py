"""Sessions: several traces as one, with values flowing from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_engine.tracing.tracer import Backend, Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


class Session(Tracer):
    """``with model.session():``; the block runs as plain code, its traces one after the other.

    The traces share the session's variables, so what one assigned the next can use without saving it. What
    is to outlive the session is saved.

    Attributes:
        model: The model that the session was opened on.
    """

    shares_all = True

    def __init__(self, model: Envoy, *, backend: Backend | None = None) -> None:
        """Open a session; ``backend`` runs its block, here by default."""
        super().__init__(backend=backend)
        self.model = model
