from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from nnsight_engine.envoys.tracers.editing import Edit
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.local_engine.local_part import ClientCall, LocalPart
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.tracing.tracer import compiled

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.remote_backend.values.received_blocks import ReceivedInvoke
    from nnsight_engine.tracing.tracer import Info, Tracer


class ReceivedTracer(InterleavingTracer):
    """The object behind ``tracer`` in a received block; created before the blocks are decoded."""

    def __init__(self, model: Envoy, call_client: ClientCall | None = None) -> None:
        super().__init__(model._run_module, model)  # noqa: SLF001 - an envoy of ours
        self._call_client = call_client
        self._attempt = secrets.token_hex(16)
        self._turns = itertools.count()
        self._received: Sequence[ReceivedInvoke] = ()
        self._kept_edits: Sequence[Edit] = ()
        self.warnings: list[str] = []

    def receive(
        self, invokes: Sequence[ReceivedInvoke], kwargs: dict[str, Any], edits: Sequence[Info]
    ) -> None:
        self._received, self.kwargs = invokes, kwargs
        self._kept_edits = [Edit(self, info) for info in edits]

    def invoke(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002 - rejected whatever they are
        """Refuse: all invokes were received with the trace."""
        raise ValueError(
            "Cannot invoke during an active model execution / interleaving. Invokes stand side by side in a "
            "trace without an input of its own: `with model.trace() as tracer:`."
        )

    def local(self) -> Tracer:
        current = self.interleaver.current
        if self._call_client is None:
            raise LocalBlockError.unreachable()
        if self.validate or current not in self.mediators:
            raise LocalBlockError.misplaced()
        number, root = self.mediators.index(current), self.model._root  # noqa: SLF001 - an envoy of ours
        assigned = {name for invoke in self._received for name in invoke.stored}
        kept = self._received[number].own.keys() - assigned
        turn = next(self._turns)
        return LocalPart(root, self._call_client, attempt=self._attempt, turn=turn, number=number, kept=kept)

    def trace(self, function: Callable[..., Any], model: Envoy, *, validate: bool) -> Any:
        self.function, self.model, self.validate = function, model, validate
        self.batcher = model._new_batcher()  # noqa: SLF001 - an envoy of ours
        return self.execute(_nothing)

    def _collect(self, function: Callable[[], Any]) -> None:  # noqa: ARG002 - the invokes are defined already
        self.batcher.shared_kwargs = self.kwargs
        for invoke in self._received:
            self.invokers.append(invoke)
            block = compiled(invoke.info, invoke.own, assignments=invoke.assignments)
            self.add(block, invoke.info, invoke.args, invoke.kwargs)
        self._check_input()

    @property
    def edits(self) -> Sequence[Edit]:
        return self._kept_edits

    def _warn(self, message: str) -> None:
        self.warnings.append(message)

    def _shares_variables(self) -> bool:
        return True  # the client has decided this: it states which variables are the same


def _nothing() -> None: ...
