from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nnsight_engine.envoys.tracers.steps import IteratorTracer
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.tracing.tracer import Backend, Info, Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


class Edit:
    """A stored block. Each trace runs it on fresh variables, once for every step."""

    def __init__(self, tracer: Tracer, info: Info) -> None:
        self.tracer = tracer
        self.info = info.fresh()

    def mediator(self, interleaver: Interleaver) -> Mediator:
        """Return the mediator that runs the edit in one trace; it sees the whole batch."""
        info = self.info.fresh()
        function = self.tracer.compile_on(info)

        def every_step() -> None:
            for _ in IteratorTracer(slice(None), interleaver):
                function()

        return Mediator(every_step, info, name="edit")


class EditingTracer(Tracer):
    """``with model.edit() as edited:``; the block runs in each trace of ``edited``."""

    def __init__(self, model: Envoy, *, inplace: bool = False, backend: Backend | None = None) -> None:
        super().__init__(backend=backend)
        self.model = model if inplace else model._shallow_copy()

    def execute(self, function: Callable[[], Any]) -> None:  # noqa: ARG002 - compiled again in each trace
        self.model._default_mediators.append(Edit(self, self.info))

    def entered(self) -> Envoy:
        return self.model
