"""The last pipeline stage: runs the blocks and receives the values that earlier stages offer.

There is one copy of each block, so saved values and errors exist once. Before its own part of a step with
traced requests, the last stage serves the others in order. Each reports the rows of the requests, receives
the list of wanted places, offers the values of those it reaches, continues with the values it receives back,
and reports when it is done. Both sides know from the scheduler's output whether a step has traced requests,
so one sends while the other receives. A stage that is ahead in the pipeline blocks until its message is
received.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.serialization import EncodeError, decode, restore_error
from nnsight_engine.serialization.values import encode_pieces
from nnsight_engine.vllm_backend.model_outline import OutlineEntry, outline_of
from nnsight_engine.vllm_backend.traces.errors import StageError
from nnsight_engine.vllm_backend.traces.messages import (
    ALL_DTYPES,
    CallOrder,
    CallResult,
    End,
    InvalidValue,
    ValueSlot,
    packed,
    slot_of,
    unpacked,
    unpacked_value,
)
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.names import Names
from nnsight_engine.vllm_backend.traces.remote_modules import (
    Description,
    RemoteModule,
    SpanningEnvoy,
    joined,
    stand_ins,
)
from nnsight_engine.vllm_backend.traces.row_payloads import (
    RemoteStageValue,
    RowPayloads,
    RowStore,
)
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.stages.messages import (
    StageOffer,
    StageReply,
    StageStep,
    ToLastStage,
    by_last_stage,
)
from nnsight_engine.vllm_backend.traces.step_facts import KnownRequests, StepFacts
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.stages.links import Channel

logger = logging.getLogger(__name__)


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
