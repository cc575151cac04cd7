"""Traces over pipeline stages: blocks run on the last stage, and the others offer it their values.

There is one copy of each block, so saved values and errors exist once. Before its own part of a step with
traced requests, the last stage serves the others in order. Each reports the rows of the requests, receives
the list of wanted places, offers the values of those it reaches, continues with the values it receives back,
and reports when it is done.

Messages go over host memory, beside vLLM's own in the same process group; a tag separates the two. A send
blocks until the other side receives, so both sides must derive the next message from the engine's step alone:
the scheduler's output says whether a step has traced requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import torch
import torch.distributed
from vllm.distributed import get_pp_group

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.serialization import EncodeError, decode, encode_error, restore_error
from nnsight_engine.serialization.message import Piece
from nnsight_engine.serialization.wire import encode_pieces
from nnsight_engine.vllm_backend.module_tree import OutlineEntry, outline_of
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters, block_adapters
from nnsight_engine.vllm_backend.traces.errors import StageError
from nnsight_engine.vllm_backend.traces.messages import (
    ALL_DTYPES,
    CallOrder,
    CallResult,
    Continue,
    End,
    InvalidValue,
    Offer,
    PassedPlaces,
    Tensors,
    ValueSlot,
    packed,
    packed_value,
    slot_of,
    unpacked,
    unpacked_value,
)
from nnsight_engine.vllm_backend.traces.model import Names, WorkerModel
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.remote_modules import (
    Description,
    RemoteModule,
    SpanningEnvoy,
    described,
    joined,
    spanning_paths,
    stand_ins,
)
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.row_payloads import (
    Form,
    RemoteStageValue,
    RowPayloads,
    RowsPlaceholder,
    RowStore,
)
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.step_facts import KnownRequests, StepFacts
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.request import TraceSpan


class StageStep(msgspec.Struct, frozen=True, tag=True):
    """A stage begins its part of a step of ``num_rows`` rows, over all requests."""

    spans: list[TraceSpan]
    num_rows: int


class StageOffer(Offer, frozen=True, tag=True):
    forms: list[Form] = msgspec.field(default_factory=list)


class StageReply(Continue, frozen=True, tag=True):
    """Let the model continue; ``live`` is None except in answers to ``StageStep``."""

    live: list[str] | None = None
    sources: list[str] = msgspec.field(default_factory=list)


ToLastStage = StageStep | StageOffer | InvalidValue | End | CallResult
ToEarlyStage = StageReply | CallOrder
by_last_stage: Final[msgspec.msgpack.Decoder[ToLastStage]] = msgspec.msgpack.Decoder(ToLastStage)
by_early_stage: Final[msgspec.msgpack.Decoder[ToEarlyStage]] = msgspec.msgpack.Decoder(ToEarlyStage)


logger = logging.getLogger(__name__)


class EarlyStageDispatcher(TraceDispatcher):
    model: WorkerModel

    def __init__(self, link: Channel, shared: Sequence[str]) -> None:
        """Offer no outputs of ``shared`` modules, of which every stage runs a part: later ones continue."""
        super().__init__()
        self.adapters = BlockAdapters()
        self._link = link
        self._shared = {f"{path}.output" for path in shared}
        self._rows = RowStore()
        self._num_reported = 0
        self._payloads: RowPayloads | None = None

    def open(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        self.begin()
        self._num_reported = 0
        self._link.send(packed(StageStep(list(spans), num_rows)))
        reply, _ = self._answer()
        live = set(reply.live or ())
        self._payloads = RowPayloads([span for span in spans if span.request_id in live], num_rows)
        self.interleaving = bool(live)
        return self.interleaving

    def close(self) -> None:
        self.end()
        self.wanted.clear()
        self._rows.clear()
        self._link.send(packed(End(self._passed())))

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - counted where blocks run
        if provider in self._shared:
            return value
        payloads = self._payloads
        assert payloads is not None  # noqa: S101 - a step is running
        kept = self._rows.keep(value)
        passed = self._passed()
        try:
            rows, forms = payloads.pack(kept)
            slots, is_tuple, body = packed_value(rows)
            message = packed(StageOffer(provider, passed, slots, is_tuple, forms), body)
        except Exception as error:
            logger.exception("a value cannot be sent to the blocks that wait for it")
            failure = StageError(f"`{provider}` cannot be sent: {error}")
            message = packed(InvalidValue(provider, passed, encode_error(failure)))
        self._link.send(message)
        reply, content = self._answer()
        given = Tensors(content, ALL_DTYPES)
        changes = [(slot.number, given.next(slot)) for slot in reply.changes]
        return self._rows.give_back(payloads.changed(kept, changes)) if changes else value

    def _passed(self) -> PassedPlaces:
        new = list(self.calls)[self._num_reported :]
        self._num_reported = len(self.calls)
        return PassedPlaces(more=[provider for provider in new if provider not in self._shared])

    def _answer(self) -> tuple[StageReply, memoryview]:
        """Wait for the answer, making the module calls that blocks request."""
        while True:
            head, body = unpacked(self._link.receive(), by_early_stage)
            if isinstance(head, CallOrder):
                with self.adapters.using(head.adapter):
                    self._call(head.path, *decode(body, resolve=self._rows.resolve))
                continue
            # Probes hold a reference to this dictionary, so it is changed in place.
            self.wanted.clear()
            self.wanted.update({provider: {} for provider in head.wanted or ()})
            for path in head.sources:
                self._look_into(path)
            return head, body

    def _look_into(self, path: str) -> None:
        try:
            self.model.get(path).source  # noqa: B018 - asking is what installs it
        except Exception:
            logger.exception("the source of %s cannot be had on this stage", path)

    def _call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listener, self.listener = self.listener, 0
        try:
            device = self.model.device or torch.device("cpu")
            here = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
            value = self._rows.keep(map_tensors(self.model.get(path)(*here[0], **here[1]), plain))
            message = packed(CallResult(), encode_pieces(value, reference=RowsPlaceholder.reference))
        except Exception as error:  # noqa: BLE001 - raised in the block
            message = packed(CallResult(encode_error(error)))
        finally:
            self.listener = listener
        self._link.send(message)


class EarlyStageTraces(PeerTraces):
    dispatcher: EarlyStageDispatcher

    def __init__(self, points: ModelPoints, config: VllmConfig, link: Channel) -> None:
        """Send the descriptions of this stage's modules to the last stage."""
        paths = [f".{path}" if path else "" for path in spanning_paths(points.family.layers)]
        dispatcher = EarlyStageDispatcher(link, [f"model{path}" for path in paths])
        super().__init__(dispatcher, WorkerModel(points, config, dispatcher))
        dispatcher.model = self.model
        dispatcher.adapters = block_adapters(points.model)
        link.send(encode_pieces(described(points.model)))

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        return bool(spans) and self.dispatcher.open(spans, num_rows)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            with super().running():
                yield
        finally:
            self.dispatcher.close()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Listening:
    """A stage that has sent a message and waits for the answer; a new object for each message."""

    stage: int
    link: Channel


class PipelineModel(SpanningEnvoy, WorkerModel):
    """The object that ``model`` refers to in a block on the last stage: the modules of all stages."""


class LastStageDispatcher(TraceDispatcher):
    """The dispatcher of the stage with the blocks, which can have earlier stages call modules."""

    traces: LastStageTraces

    def call_module(self, envoy: Envoy, *args: torch.Tensor) -> Any:
        """Call a module for a block in another process; StageError unless its own stage is being served."""
        module = envoy._module  # noqa: SLF001 - an envoy of ours
        if not isinstance(module, RemoteModule):
            return super().call_module(envoy, *args)
        return self.traces.call_on_stage(module.stage, str(envoy.path), args)


class LastStageTraces(WorkerTraces):
    """The traced requests of a pipeline, on its last stage.

    A step waits for sandboxed blocks instead of continuing without them: only while a stage is being served
    can its modules be called, and whether a block's call succeeds must not depend on the block's speed.
    """

    serves_stages = True
    dispatcher: LastStageDispatcher

    def __init__(
        self, points: ModelPoints, config: VllmConfig, links: Sequence[Channel], limits: EngineLimits
    ) -> None:
        self._links = links
        self._listening: _Listening | None = None
        self._exchange_lock = threading.Lock()
        self._known = KnownRequests()
        self._has_begun = False
        self._begun: list[TraceSpan] = []
        self._device = next(points.model.parameters()).device
        self._stages: list[list[Description]] = [decode(link.receive()) for link in links]
        self.elsewhere = stand_ins(points.model, self._stages, self)
        super().__init__(points, config, limits, dispatcher=LastStageDispatcher())
        self.dispatcher.traces = self

    def _new_model(self, names: Names) -> WorkerModel:
        return PipelineModel(self._points, self._config, self.dispatcher, self.elsewhere, names)

    def described_modules(self) -> list[Description]:
        return joined([*self._stages, super().described_modules()])

    def outline(self) -> list[OutlineEntry]:
        return outline_of(self.model._module, self.elsewhere)  # noqa: SLF001 - an envoy of ours

    # A step.

    @torch.inference_mode()
    def before(self, facts: StepFacts) -> None:
        self._known.note(facts)
        if self._known.present.isdisjoint(facts.scheduled):
            return
        for stage, link in enumerate(self._links):
            head, _ = self._receive_message(stage, link)
            assert isinstance(head, StageStep)  # noqa: S101 - its first message
            if stage == 0:
                # Now that modules of this stage can be called.
                super().begin(dataclasses.replace(facts, bound=frozenset(facts.scheduled)))
                self._has_begun = True
                self._begun = [span for span in head.spans if self.takes_part(span.request_id)]
                super().step(self._begun, head.num_rows)
            live = [span for span in head.spans if self.takes_part(span.request_id)]
            self._answer(live=[span.request_id for span in live])
            if live:
                self._serve(stage, link, RowPayloads(live, head.num_rows))

    def _serve(self, stage: int, link: Channel, payloads: RowPayloads) -> None:
        while True:
            head, body = self._receive_message(stage, link)
            assert isinstance(head, StageOffer | InvalidValue | End)  # noqa: S101 - it has begun
            self.dispatcher.calls.update(dict.fromkeys(head.passed.more, 1))
            if isinstance(head, End):
                return
            changes: list[tuple[ValueSlot, memoryview]] = []
            if isinstance(head, StageOffer):
                changes = self._offered(payloads, stage, head, body)
            else:
                self.dispatcher.fail(head.provider, restore_error(head.error))
            self._answer(changes)

    def _receive_message(self, stage: int, link: Channel) -> tuple[ToLastStage, memoryview]:
        """Receive a stage's next message; until it is answered, the stage accepts calls of modules."""
        head, body = unpacked(link.receive(), by_last_stage)
        self._listening = None if isinstance(head, End) else _Listening(stage, link)
        return head, body

    def _answer(
        self, changes: Sequence[tuple[ValueSlot, memoryview]] = (), live: list[str] | None = None
    ) -> None:
        with self._exchange_lock:
            listening = self._listening
            assert listening is not None  # noqa: S101 - it has just spoken
            looked_into = [
                str(one.source.path)
                for one in self.model._sources  # noqa: SLF001 - an envoy of ours
                if isinstance(one.module, RemoteModule) and one.module.stage == listening.stage
            ]
            slots = [slot for slot, _ in changes]
            reply = StageReply(list(self.dispatcher.wanted), slots, live, looked_into)
            listening.link.send(packed(reply, [content for _, content in changes]))
            self._listening = None

    def _offered(
        self, payloads: RowPayloads, stage: int, head: StageOffer, body: memoryview
    ) -> list[tuple[ValueSlot, memoryview]]:
        if head.provider not in self.dispatcher.wanted:
            return []
        try:
            rows = unpacked_value(head, body, lambda name: RemoteStageValue(name, stage))
            value = payloads.unpack(rows, head.forms, self._device)
            changes = payloads.changes(value, self.dispatcher.offer(head.provider, None, value))
            return [slot_of(changed, number, dtypes=ALL_DTYPES) for number, changed in changes]
        except Exception as error:
            logger.exception("a value of another stage could not be shared with traced requests")
            self.dispatcher.fail(head.provider, error)
            return []

    def begin(self, facts: StepFacts) -> None:
        has_begun, self._has_begun = self._has_begun, False
        if not has_begun:
            super().begin(facts)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Continue with the step that ``before`` has begun on the first stage."""
        del num_rows
        begun, self._begun = self._begun, []
        if list(spans) != [span for span in begun if self.has_block(span.request_id)]:
            for request in self._active:
                request.refuse("", StageError.unlike())
            for session in self.sandboxes.active:
                session.connection.give_up(StageError.unlike())
        return self.in_step

    # Calls of remote modules by blocks.

    def call(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call another stage's module for the running block; StageError unless the stage is being served."""
        listening, mediator = self._listening, self.dispatcher.current
        worker = None if mediator is None else mediator.worker
        if listening is None or listening.stage != stage or worker is None or not worker.is_current():
            raise StageError.call(path, stage)
        refused = RowStore.refusal((args, kwargs))
        if refused is not None:
            raise StageError.argument(path, refused)
        args, kwargs = map_tensors((args, kwargs), plain)
        adapter = self._adapters.current
        answers: list[Any] = []
        errors: list[BaseException] = []

        def exchange() -> None:
            try:
                answers.append(self._exchange(listening, path, args, kwargs, adapter))
            except BaseException as error:  # noqa: BLE001 - raised in the block
                errors.append(error)

        # On a separate thread: the block's may be interrupted, and half a message would break the protocol.
        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return answers[0]

    def call_on_stage(self, stage: int, path: str, args: Sequence[torch.Tensor]) -> Any:
        """Call a module for a block in another process; StageError unless the stage is being served."""
        listening = self._listening
        if listening is None or listening.stage != stage:
            raise StageError.call(path, stage)
        return self._exchange(listening, path, tuple(map(plain, args)), {}, self._adapters.current)

    def _exchange(
        self,
        listening: _Listening,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        adapter: int | None,
    ) -> Any:
        """Have a stage call a module; StageError if it has been answered, or an argument cannot be sent."""
        with self._exchange_lock:
            if self._listening is not listening:
                raise StageError.call(path, listening.stage)  # the block was abandoned meanwhile
            try:
                arguments = encode_pieces((args, kwargs), reference=RemoteStageValue.reference)
            except EncodeError as error:
                raise StageError.argument(path, str(error)) from None
            listening.link.send(packed(CallOrder(path, adapter=adapter), arguments))
            head, body = unpacked(listening.link.receive(), by_last_stage)
        assert isinstance(head, CallResult)  # noqa: S101 - nothing else follows a call
        if head.error is not None:
            raise restore_error(head.error)
        value = decode(body, resolve=lambda name: RemoteStageValue(name, listening.stage))
        return map_tensors(value, lambda tensor: tensor.to(self._device))

    def missing_attribute(self, stage: int, path: str, name: str) -> Exception:
        return StageError.attribute(path, name, stage)


_TAG: Final = 0x6E6E


class Channel(Protocol):
    """An ordered message channel: a ``StageLink``, or a pair of queues in a test."""

    def send(self, message: Sequence[Piece]) -> None:
        """Send a message, given as parts; may block until it is received."""

    def receive(self) -> memoryview:
        """Wait for the next message; return its bytes, to which no other code writes."""


class StageLink:
    def __init__(self, stage: int) -> None:
        group = get_pp_group()
        self._group = group.cpu_group
        self._peer = group.ranks[stage]

    def send(self, message: Sequence[Piece]) -> None:
        data = torch.frombuffer(bytearray().join(message), dtype=torch.uint8)
        for part in (torch.tensor([data.numel()]), data):
            torch.distributed.send(part, dst=self._peer, group=self._group, tag=_TAG)

    def receive(self) -> memoryview:
        size = torch.empty(1, dtype=torch.long)
        torch.distributed.recv(size, src=self._peer, group=self._group, tag=_TAG)
        data = torch.empty(int(size), dtype=torch.uint8)
        torch.distributed.recv(data, src=self._peer, group=self._group, tag=_TAG)
        return data.numpy().data


def own_stage() -> int:
    stage: int = get_pp_group().rank_in_group
    return stage


def num_stages() -> int:
    size: int = get_pp_group().world_size
    return size
