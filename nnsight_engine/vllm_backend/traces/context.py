"""One trace in the worker: its decoded blocks, their ``tracer`` and shared variables, and their mediators.

The data that a traced request carries in ``SamplingParams.extra_args``, and the marks of saved values.

The whole trace is sent with each request, since it is not known which the engine runs first; it is decoded
once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NoReturn

import msgspec

from nnsight_engine.core.saves import SAVES
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.interleaving.shared_variables import Barrier, exchanges
from nnsight_engine.interleaving.threads import ThreadMediator, Threads
from nnsight_engine.remote_backend.codecs import decode_blocks
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.remote_backend.values.received_blocks import SAVED, ReceivedInvoke, invokes_of
from nnsight_engine.serialization import TRUSTED, Policy
from nnsight_engine.tracing.tracer import compiled
from nnsight_engine.vllm_backend.traces.block_adapters import NO_ADAPTER
from nnsight_engine.vllm_backend.traces.caches import RequestCache
from nnsight_engine.vllm_backend.traces.points import place_named

if TYPE_CHECKING:
    import torch

    from nnsight_engine.envoys.missed_values import CacheMisses
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.request import TracedRequest

TRACE_KEY: Final = "nnsight_engine_trace"


class EditEntry(msgspec.Struct, frozen=True):
    """A selected edit; ``digest`` is that of the intended block, ``data`` None if the engine stores it."""

    name: str
    digest: str
    data: bytes | None = None


class CodeOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's code comes from; without a default, so that no code is trusted by omission.

    ``sandbox_of`` is the tenant in whose sandbox process the blocks run, None if their sender is trusted.
    """

    sandbox_of: Annotated[str, msgspec.Meta(min_length=1)] | None


class TraceEntry(CodeOrigin, frozen=True):
    """A request's part in a trace.

    Attributes:
        index: Index of the request's block among the trace's.
        num_choices: Number of requests that run the block (``n`` of its sampling parameters).
        data: All blocks, encoded; empty if the worker has them already, see ``WorkerTraces.hold``.
        groups: For each block, its variables with numbers of surrounding ones; equal ones are one variable.
        edits: The edits that run beside the block, in the order in which they receive each value.
        is_dry_run: Whether the request ends once its block has nothing new to ask for, see ``request``.
        codec: The encoding of the blocks; only trusted senders may use another than ``wire``.
        wanted: Names of variables whose values are returned although they were not saved.
        prints: Whether printed text is reported to the client instead of printed by the worker.
        plain: Whether saved values must be JSON types and tensors, see ``json_values``.
    """

    key: str
    index: Annotated[int, msgspec.Meta(ge=0)]
    num_choices: Annotated[int, msgspec.Meta(ge=1)]
    data: bytes
    groups: list[dict[str, int]]
    streams: bool = False
    edits: list[EditEntry] = []
    is_dry_run: bool = False
    is_scan: bool = False
    codec: str = "wire"
    wanted: list[str] = []
    prints: bool = False
    compresses: bool = False
    plain: bool = False
    adapter: int = NO_ADAPTER

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return plain

    def choice_of(self, request_id: str) -> int:
        """Return which of its ``n`` choices a request is: vLLM names these <choice>_<parent>."""
        return int(request_id.partition("_")[0]) if self.num_choices > 1 else 0

    @staticmethod
    def from_plain(plain: Any) -> TraceEntry:
        return msgspec.convert(plain, TraceEntry)


class BlockTracer(InterleavingTracer):
    """The tracer of one trace on the worker's side: loops, barriers, stop, caches, the result."""

    caches_inputs: ClassVar[bool] = False

    def __init__(self, model: WorkerModel) -> None:
        super().__init__(_runs_nothing, model)
        self._barriers: dict[int, Barrier] = {}

    def invoke(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002 - refused whatever it is
        """Raise: the requests of the trace are already running."""
        raise ValueError(
            "Cannot invoke during an active model execution / interleaving. Invokes stand side by "
            "side in a trace without an input of its own: `with model.trace() as tracer:`."
        )

    def local(self) -> NoReturn:
        """Raise: the step of all requests would wait for the local code."""
        raise LocalBlockError.on_vllm()

    def _new_cache(
        self, *, device: torch.device | str | None, dtype: torch.dtype | None, detach: bool
    ) -> RequestCache:
        return RequestCache(device=device, dtype=dtype, detach=detach)

    def _note_cache(self, cache: CacheMisses) -> None:
        """Register a cache with the request whose block made it, which warns of missed values at its end."""
        current = self.interleaver.current
        assert current is not None  # noqa: S101 - its block has made the cache
        request: TracedRequest = current.interleaver  # type: ignore[assignment] # here they are requests
        request.cache_misses.append(cache)

    def known_barrier(self, number: int, participants: int) -> Barrier:
        """Return the barrier of a number, which was made before the invokes; all invokes share it."""
        barrier = self._barriers.get(number)
        if barrier is None:
            barrier = self._barriers[number] = Barrier(self.interleaver, participants)
        return barrier


def _runs_nothing() -> NoReturn:
    raise AssertionError("the engine runs the model")


class TraceContext:
    """The blocks of one trace; ``policy`` is None for those of trusted senders."""

    def __init__(self, entry: TraceEntry, model: WorkerModel, policy: Policy | None = None) -> None:
        """Decode the blocks on a block's thread, since this runs their sender's code."""
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
        self._saved_before = list(self._saved)  # by the client, before the trace
        self._marked: list[dict[int, Any]] = []  # of each block that has begun: what it saved, by id
        self._wanted_names = frozenset(entry.wanted)

    def code(self, index: int) -> CodeType:
        """Return a block's code object; equal blocks have equal code objects."""
        return self._invokes[index].info.block.code

    def mediator(
        self, index: int, choice: int, threads: Threads, enter: Callable[[], None]
    ) -> ThreadMediator:
        """Return a block's mediator, seeded per choice; ``enter`` is called on its thread before it runs."""
        invoke = self._invokes[index]
        function = compiled(invoke.info, invoke.cells, assignments=invoke.assignments)
        seed = zlib.crc32(f"{self.key}/{index}/{choice}".encode())
        mediator = ThreadMediator(self._saving(function, invoke, enter), invoke.info, threads, seed=seed)
        mediator.exchange = self._exchanges[index]
        return mediator

    def _saving(
        self, function: Callable[[], Any], invoke: ReceivedInvoke, enter: Callable[[], None]
    ) -> Callable[[], Any]:
        """Return what a block's thread runs: ``enter``, then the block, collecting the values it saves."""

        def run() -> None:
            enter()
            with SAVES.outermost() as marked:  # of this thread, by identity
                marked.update({id(value): value for value in self._saved_before})
                self._marked.append(marked)
                invoke.marked = marked
                function()

        return run

    def marked(self, index: int) -> list[Any]:
        return list(self._invokes[index].marked.values())

    def _all_marked(self) -> dict[int, Any]:
        return {key: value for marked in self._marked for key, value in marked.items()}

    def saves(self, index: int) -> dict[str, Any]:
        return self._invokes[index].saves(self._all_marked())

    def flows(self, index: int) -> dict[str, Any]:
        """Return the variables of a block that were not saved but that the client wants, by name."""
        return self._invokes[index].flows(self._all_marked(), self._wanted_names)

    @property
    def saved_before(self) -> list[Any]:
        """The values saved before the blocks ran, as the blocks have left them."""
        return list(self._saved)

    def _resolved(self, reference: tuple[str, ...]) -> Any:
        """Return the worker's object for a reference in the blocks: the tracer, a barrier or a module."""
        kind, *rest = reference
        if kind == "tracer":
            return self._tracer
        if kind == "barrier":
            return self._tracer.known_barrier(int(rest[0]), int(rest[1]))
        return place_named(self._model, kind, rest[0])
