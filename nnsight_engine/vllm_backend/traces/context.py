"""One trace in the worker: its decoded blocks, their shared variables, and the mediators that run them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

from nnsight_engine.interleaving.shared_variables import exchanges
from nnsight_engine.interleaving.threads import ThreadMediator, Threads
from nnsight_engine.remote_backend.codecs import decode_blocks
from nnsight_engine.remote_backend.values.received_blocks import SAVED, ReceivedInvoke, invokes_of
from nnsight_engine.serialization import TRUSTED, Policy
from nnsight_engine.tracing.tracer import compiled
from nnsight_engine.vllm_backend.traces.entry import Marks, TraceEntry
from nnsight_engine.vllm_backend.traces.points import place_named
from nnsight_engine.vllm_backend.traces.points_edits import EditMediator
from nnsight_engine.vllm_backend.traces.tracer import BlockTracer

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.model import WorkerModel


class TraceContext:
    """The blocks of one trace; ``policy`` is None for those of trusted senders."""

    def __init__(self, entry: TraceEntry, model: WorkerModel, policy: Policy | None = None) -> None:
        self.key = entry.key
        self._model = model
        self._tracer = BlockTracer(model)
        # Only the server makes entries, and it has checked that the sender may use this codec.
        received = decode_blocks(
            entry.codec, entry.data, resolve=self._resolved, trusted=policy is None, policy=policy or TRUSTED
        )
        self._invokes = invokes_of(received.blocks, entry.groups)
        self._exchanges = exchanges(self._invokes)
        self._saved: list[Any] = received.shared.get(SAVED, [])
        self._marks = Marks(self._saved)
        self._wanted = frozenset(entry.wanted)

    def code(self, index: int) -> CodeType:
        """Return a block's code object; equal blocks have equal code objects."""
        return self._invokes[index].info.block.code

    def mediator(
        self, index: int, choice: int, threads: Threads, enter: Callable[[], None]
    ) -> ThreadMediator:
        """Return a block's mediator, seeded per choice; ``enter`` is called on its thread before it runs."""
        invoke = self._invokes[index]
        function = compiled(invoke.info, invoke.own, assignments=invoke.assignments)
        seed = zlib.crc32(f"{self.key}/{index}/{choice}".encode())
        mediator = EditMediator(self._saving(function, invoke, enter), invoke.info, threads, seed=seed)
        mediator.exchange = self._exchanges[index]
        return mediator

    def _saving(
        self, function: Callable[[], Any], invoke: ReceivedInvoke, enter: Callable[[], None]
    ) -> Callable[[], Any]:
        def run() -> None:
            enter()
            with self._marks.collecting() as invoke.marked:
                function()

        return run

    def marked(self, index: int) -> list[Any]:
        return list(self._invokes[index].marked.values())

    def saves(self, index: int) -> dict[str, Any]:
        return self._invokes[index].saves(self._marks.all())

    def flows(self, index: int) -> dict[str, Any]:
        """Return the variables of a block that were not saved but that the client wants, by name."""
        return self._invokes[index].flows(self._marks.all(), self._wanted)

    @property
    def saved_before(self) -> list[Any]:
        """The values saved before the blocks ran, as the blocks have left them."""
        return list(self._saved)

    def _resolved(self, reference: tuple[str, ...]) -> Any:
        kind, *rest = reference
        if kind == "tracer":
            return self._tracer
        if kind == "barrier":
            return self._tracer.known_barrier(int(rest[0]), int(rest[1]))
        return place_named(self._model, kind, rest[0])
