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

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
import torch.distributed
from vllm.distributed import get_pp_group

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.interleaving.threads import ThreadMediator
from nnsight_engine.serialization import EncodeError, decode, encode_error, restore_error
from nnsight_engine.serialization.message import Piece
from nnsight_engine.serialization.wire import encode_pieces
from nnsight_engine.vllm_backend.module_tree import OutlineEntry, outline_of
from nnsight_engine.vllm_backend.traces.block_adapters import block_adapters
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
    StepFacts,
    Tensors,
    ValueSlot,
    packed,
    packed_value,
    slot_of,
    unpacked,
    unpacked_value,
)
from nnsight_engine.vllm_backend.traces.model import Names, WorkerModel
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
    RemoteValue,
    RowPayloads,
    RowsPlaceholder,
    RowStore,
)
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints


class StageStep(msgspec.Struct, frozen=True, tag=True):
    """A stage begins its part of a step of ``num_rows`` rows, over all requests."""

    spans: list[TraceSpan]
    num_rows: int


class StageReply(Continue, frozen=True, tag=True):
    """Let the model continue; ``live`` is None except in answers to ``StageStep``."""

    live: list[str] | None = None
    sources: list[str] = msgspec.field(default_factory=list)


ToLastStage = StageStep | Offer | InvalidValue | End | CallResult
ToEarlyStage = StageReply | CallOrder
by_last_stage: Final[msgspec.msgpack.Decoder[ToLastStage]] = msgspec.msgpack.Decoder(ToLastStage)
by_early_stage: Final[msgspec.msgpack.Decoder[ToEarlyStage]] = msgspec.msgpack.Decoder(ToEarlyStage)


logger = logging.getLogger(__name__)

_TAG: Final = 0x6E6E


class StageLink:
    """A channel to another stage, over host memory."""

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


class EarlyStageDispatcher(TraceDispatcher):
    """Offers the last stage the values of a stage that runs no blocks, in each step with traced requests."""

    runs_blocks = False
    is_joint = True

    def __init__(self, link: StageLink, points: ModelPoints) -> None:
        """Send the descriptions of this stage's modules to the last stage."""
        super().__init__()
        self.adapters = block_adapters(points.model)
        self._link = link
        # Every stage runs a part of these, so that their outputs are the last one's.
        paths = [f".{path}" if path else "" for path in spanning_paths(points.family.layers)]
        self._shared = {f"model{path}.output" for path in paths}
        self._rows = RowStore()
        self._num_reported = 0
        self._payloads: RowPayloads | None = None
        link.send(encode_pieces(described(points.model)))

    def jointly(self, act: Callable[[], Any]) -> None:
        """Do nothing: between steps, blocks can call no modules of this stage."""

    def start_step(self, spans: Sequence[TraceSpan], num_rows: int, act: Callable[[], bool]) -> bool:
        """Report the step's rows to the last stage; return its answer, whether a block takes part."""
        del act
        self.begin_step()
        self._num_reported = 0
        self._link.send(packed(StageStep(list(spans), num_rows)))
        reply, _ = self._answer()
        live = set(reply.live or ())
        self._payloads = RowPayloads([span for span in spans if span.request_id in live], num_rows)
        self.interleaving = bool(live)
        return self.interleaving

    def pause(self) -> None:
        """Stop observing module calls, and report that this stage's part of the model has run."""
        super().pause()
        self.wanted.clear()
        self._rows.clear()
        self._link.send(packed(End(self._passed())))

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - counted where blocks run
        """Send the last stage the requests' rows of a value; return the value with the changes it answers."""
        if provider in self._shared:
            return value
        payloads = self._payloads
        assert payloads is not None  # noqa: S101 - a step is running
        sendable = self._rows.keep(value)
        passed = self._passed()
        try:
            rows, forms = payloads.pack(sendable)
            slots, is_tuple, body = packed_value(rows)
            message = packed(Offer(provider, passed, slots, is_tuple, forms=forms), body)
        except Exception as error:
            logger.exception("a value cannot be sent to the blocks that wait for it")
            failure = StageError(f"`{provider}` cannot be sent: {error}")
            message = packed(InvalidValue(provider, passed, encode_error(failure)))
        self._link.send(message)
        reply, content = self._answer()
        received = Tensors(content, ALL_DTYPES)
        changes = [(slot.number, received.next(slot)) for slot in reply.changes]
        return self._rows.give_back(payloads.changed(sendable, changes)) if changes else value

    def _passed(self) -> PassedPlaces:
        new = list(self.calls)[self._num_reported :]
        self._num_reported = len(self.calls)
        return PassedPlaces(more=[provider for provider in new if provider not in self._shared])

    def _answer(self) -> tuple[StageReply, memoryview]:
        """Wait for the last stage to answer, making the module calls that its blocks request meanwhile."""
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
        """Install the source of a module: a block on the last stage asks for operations inside it."""
        try:
            self.model.get(path).source  # noqa: B018 - asking is what installs it
        except Exception:
            logger.exception("the source of %s cannot be had on this stage", path)

    def _call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a module of this stage for a block on another, and send the result or the error.

        No thread has the id 0, so probes stay silent.
        """
        listener, self.listener = self.listener, 0
        try:
            device = self.model.device or torch.device("cpu")
            on_device = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
            value = self._rows.keep(map_tensors(self.model.get(path)(*on_device[0], **on_device[1]), plain))
            message = packed(CallResult(), encode_pieces(value, reference=RowsPlaceholder.reference))
        except Exception as error:  # noqa: BLE001 - raised in the block
            message = packed(CallResult(encode_error(error)))
        finally:
            self.listener = listener
        self._link.send(message)


def _remote_value(stage: int) -> Callable[[tuple[str, ...]], RemoteValue]:
    refusal = functools.partial(StageError.value, stage=stage)
    return functools.partial(RemoteValue, place=f"on pipeline stage {stage}", refusal=refusal)


class PipelineModel(SpanningEnvoy, WorkerModel):
    """The object that ``model`` refers to in a block on the last stage: the modules of all stages."""


class LastStageDispatcher(TraceDispatcher):
    """Serves the other stages; while one of them waits for an answer, blocks can have it call modules."""

    def __init__(self, links: Sequence[StageLink], points: ModelPoints) -> None:
        super().__init__()
        self.links = links
        self._asking: int | None = None  # the stage that waits for an answer
        self._adapters = block_adapters(points.model)
        self._device = next(points.model.parameters()).device

    def receive(self, stage: int) -> tuple[ToLastStage, memoryview]:
        """Receive a stage's next message; until it is answered, the stage accepts calls of modules."""
        head, body = unpacked(self.links[stage].receive(), by_last_stage)
        self._asking = None if isinstance(head, End) else stage
        return head, body

    def answer(
        self, stage: int, changes: Sequence[tuple[ValueSlot, memoryview]] = (), live: list[str] | None = None
    ) -> None:
        """Let a stage continue, with the tensors that blocks changed.

        As its step begins, it gets the ids of the requests that take part (``live``); later ``live`` is None.
        """
        source_paths = [
            str(source.source.path)
            for source in self.model._sources  # noqa: SLF001 - an envoy of ours
            if isinstance(source.module, RemoteModule) and source.module.stage == stage
        ]
        reply = StageReply(list(self.wanted), [slot for slot, _ in changes], live, source_paths)
        self.links[stage].send(packed(reply, [content for _, content in changes]))
        self._asking = None

    def serve(self, stage: int, payloads: RowPayloads) -> None:
        """Serve blocks the values of a stage, until it has run its part of the model."""
        while True:
            head, body = self.receive(stage)
            assert isinstance(head, Offer | InvalidValue | End)  # noqa: S101 - it has begun
            self.calls.update(dict.fromkeys(head.passed.more, 1))
            if isinstance(head, End):
                return
            changes: list[tuple[ValueSlot, memoryview]] = []
            if isinstance(head, Offer):
                changes = self._offered(payloads, stage, head, body)
            else:
                self.fail(head.provider, restore_error(head.error))
            self.answer(stage, changes)

    def _offered(
        self, payloads: RowPayloads, stage: int, head: Offer, body: memoryview
    ) -> list[tuple[ValueSlot, memoryview]]:
        """Offer the blocks another stage's value; return slots and bytes of the rows that they changed."""
        if head.provider not in self.wanted:
            return []
        try:
            rows = unpacked_value(head, body, _remote_value(stage))
            value = payloads.unpack(rows, head.forms, self._device)
            changes = payloads.changes(value, self.offer(head.provider, None, value))
            return [slot_of(changed, number, dtypes=ALL_DTYPES) for number, changed in changes]
        except Exception as error:
            logger.exception("a value of another stage could not be shared with traced requests")
            self.fail(head.provider, error)
            return []

    # Calls of remote modules by blocks.

    def call_elsewhere(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call another stage's module for the running block; StageError unless the stage is being served."""
        mediator = self.current
        worker = None if mediator is None else mediator.worker
        if not isinstance(mediator, ThreadMediator) or worker is None or not worker.is_current():
            raise StageError.call(path, stage)
        refused = RowStore.refusal((args, kwargs))
        if refused is not None:
            raise StageError.argument(path, refused)
        sent = map_tensors((args, kwargs), plain)
        adapter = self._adapters.current  # of this thread, which is not the model's
        return mediator.on_models_thread(lambda: self._called(stage, path, *sent, adapter), path)

    def call_module(self, envoy: Envoy, *args: torch.Tensor) -> Any:
        """Call a module for a block in another process; StageError unless its own stage is being served."""
        module = envoy._module  # noqa: SLF001 - an envoy of ours
        if not isinstance(module, RemoteModule):
            return super().call_module(envoy, *args)
        sent = tuple(map(plain, args))
        return self._called(module.stage, str(envoy.path), sent, {}, self._adapters.current)

    def _called(
        self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], adapter: int | None
    ) -> Any:
        """Have a stage call its module, and return the result; StageError unless it is being served."""
        if self._asking != stage:
            raise StageError.call(path, stage)
        try:
            arguments = encode_pieces((args, kwargs), reference=RemoteValue.reference)
        except EncodeError as error:
            raise StageError.argument(path, str(error)) from None
        self.links[stage].send(packed(CallOrder(path, adapter=adapter), arguments))
        head, body = unpacked(self.links[stage].receive(), by_last_stage)
        assert isinstance(head, CallResult)  # noqa: S101 - nothing else follows a call
        if head.error is not None:
            raise restore_error(head.error)
        with torch.inference_mode(mode=False):  # blocks run outside of it, and may edit the value
            value = decode(body, resolve=_remote_value(stage))
            return map_tensors(value, lambda tensor: tensor.to(self._device))


class LastStageTraces(WorkerTraces):
    """The traced requests of a pipeline, on its last stage.

    A step waits for sandboxed blocks instead of continuing without them: only while a stage is being served
    can its modules be called, and whether a block's call succeeds must not depend on the block's speed.
    """

    serves_stages = True
    dispatcher: LastStageDispatcher

    def __init__(
        self, points: ModelPoints, config: VllmConfig, links: Sequence[StageLink], limits: EngineLimits
    ) -> None:
        """Receive the other stages' descriptions of their modules, and make stand-ins from them."""
        self._has_begun = False
        self._begun: list[TraceSpan] = []
        self._stages: list[list[Description]] = [decode(link.receive()) for link in links]
        self.elsewhere = stand_ins(points.model, self._stages)
        super().__init__(points, config, limits, dispatcher=LastStageDispatcher(links, points))

    def _new_model(self, names: Names) -> WorkerModel:
        return PipelineModel(self._points, self._config, self.dispatcher, self.elsewhere, names)

    def described_modules(self) -> list[Description]:
        return joined([*self._stages, super().described_modules()])

    def outline(self) -> list[OutlineEntry]:
        return outline_of(self.model._module, self.elsewhere)  # noqa: SLF001 - an envoy of ours

    # A step.

    @torch.inference_mode()
    def before(self, facts: StepFacts) -> None:
        """Serve the stages before this one, which compute their parts of the step one after the other."""
        self._has_begun = False
        if {*self.known.present, *(name for name, _ in facts.arrived)}.isdisjoint(facts.scheduled):
            return
        for stage in range(len(self._stages)):
            head, _ = self.dispatcher.receive(stage)
            assert isinstance(head, StageStep)  # noqa: S101 - its first message
            if stage == 0:
                # Now that modules of this stage can be called.
                super().begin_step(dataclasses.replace(facts, bound=frozenset(facts.scheduled)))
                self._has_begun = True
                self._begun = [span for span in head.spans if self.takes_part(span.request_id)]
                super().step(self._begun, head.num_rows)
            live = [span for span in head.spans if self.takes_part(span.request_id)]
            self.dispatcher.answer(stage, live=[span.request_id for span in live])
            if live:
                self.dispatcher.serve(stage, RowPayloads(live, head.num_rows))

    def begin_step(self, facts: StepFacts) -> None:
        has_begun, self._has_begun = self._has_begun, False
        if not has_begun:
            super().begin_step(facts)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Continue with the step that ``before`` has begun; end all blocks if the rows are not those."""
        del num_rows
        begun, self._begun = self._begun, []
        if list(spans) != [span for span in begun if self.has_block(span.request_id)]:
            for request in self._active:
                request.refuse("", StageError.unlike())
            for session in self.sandboxes.active:
                session.connection.give_up(StageError.unlike())
        return self.in_step
