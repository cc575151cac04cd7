"""The last pipeline stage: runs the blocks and receives the values that earlier stages offer.

There is one copy of each block, so no execution must be kept identical on several stages, and saved values
and errors exist once. Before the last stage begins its own part of a step with traced requests, it serves the
other stages in the order in which the step passes them. Each stage reports the rows of the requests, receives
the list of wanted places, offers the values of those it reaches, continues with the values it receives back,
and reports when it is done. Both sides know from the scheduler's output whether a step has traced requests,
so at any time one side sends and the other receives. Steps may follow each other closely in the pipeline: a
stage that is ahead blocks until its message is received.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.serialization import EncodeError, restore_error
from nnsight_engine.vllm_backend.model_outline import OutlineEntry, outline_of
from nnsight_engine.vllm_backend.traces.errors import SandboxedError, StageError
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.names import Names
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.stages.remote_modules import (
    RemoteModule,
    SpanningEnvoy,
    stand_ins,
)
from nnsight_engine.vllm_backend.traces.stages.row_payloads import (
    Form,
    RemoteStageValue,
    RowPayloads,
    RowStore,
)
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.families import ModelPoints
    from nnsight_engine.vllm_backend.traces.stages.links import Channel

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Listening:
    """A stage that has sent a message and waits for the answer; a new object for each message."""

    stage: int
    link: Channel


class PipelineModel(SpanningEnvoy, WorkerModel):
    """The object that ``model`` refers to in a block on the last stage: the modules of all stages."""


class LastStageTraces(WorkerTraces):
    """The traced requests of a pipeline, on its last stage.

    Args:
        points: The points of the model, of which this stage has the last part.
        config: vLLM's configuration.
        links: The links to the earlier stages, in order.
        limits: Resource limits for blocks.
    """

    def __init__(
        self, points: ModelPoints, config: VllmConfig, links: Sequence[Channel], limits: EngineLimits
    ) -> None:
        """Receive the descriptions of the other stages' modules."""
        self._links = links
        self._listening: _Listening | None = None
        self._exchange = threading.Lock()
        self._registered: set[str] = set()
        self._begun: list[TraceSpan] = []
        self._device = next(points.model.parameters()).device
        stages = [link.receive()[0] for link in links]
        self.elsewhere = stand_ins(points.model, stages, self)
        super().__init__(points, config, limits)

    def _new_model(self, names: Names) -> WorkerModel:
        return PipelineModel(self._points, self._config, self.dispatcher, self.elsewhere, names)

    def _open_sandbox_pool(self) -> None:
        raise SandboxedError.spread()

    def outline(self) -> list[OutlineEntry]:
        """List the modules of all stages."""
        return outline_of(self.model._module, self.elsewhere)  # noqa: SLF001 - an envoy of ours

    # A step.

    @torch.inference_mode()
    def before(
        self, scheduled: Collection[str], arrived: Sequence[tuple[str, Any]], finished: set[str]
    ) -> None:
        """Serve the earlier stages if traced requests are in the step.

        Args:
            scheduled: All requests in the step.
            arrived: The new requests that are traced.
            finished: All requests that have ended.
        """
        self._registered -= finished
        self._registered.update(request_id for request_id, _ in arrived)
        if self._registered.isdisjoint(scheduled):
            return
        for stage, link in enumerate(self._links):
            _, span_data, num_rows = self._receive_message(stage, link)
            if stage == 0:
                self.begin(arrived, finished)  # now that modules of this stage can be called
                self._begun = [span for span in map(_span, span_data) if self.takes_part(span.request_id)]
                super().step(self._begun, num_rows)
            live = [span for span in map(_span, span_data) if self.takes_part(span.request_id)]
            self._answer([span.request_id for span in live])
            if live:
                self._serve(stage, link, RowPayloads(live, num_rows))

    def _serve(self, stage: int, link: Channel, payloads: RowPayloads) -> None:
        """Give blocks the values they wait for on a stage, until the stage reports that it is done."""
        while True:
            kind, passed, *rest = self._receive_message(stage, link)
            self.dispatcher.calls.update(dict.fromkeys(passed, 1))
            if kind == "done":
                return
            changes: list[Any] = []
            if kind == "offer":
                changes = self._offered(payloads, *rest)
            else:
                self.dispatcher.fail(rest[0], StageError(rest[1]))
            try:
                self._answer(changes)
            except EncodeError as error:
                self.dispatcher.fail(rest[0], error)
                self._answer([])

    def _receive_message(self, stage: int, link: Channel) -> tuple[Any, ...]:
        """Receive a stage's next message; until it is answered, the stage accepts calls of modules."""
        message = link.receive(resolve=lambda name: RemoteStageValue(name, stage))
        self._listening = None if message[0] == "done" else _Listening(stage, link)
        return message

    def _answer(self, what: Any) -> None:
        """Answer the listening stage, with the wanted places and the modules whose source is inspected."""
        with self._exchange:
            listening = self._listening
            assert listening is not None  # noqa: S101 - it has just spoken
            looked_into = [
                str(one.source.path)
                for one in self.model._sources  # noqa: SLF001 - an envoy of ours
                if isinstance(one.module, RemoteModule) and one.module.stage == listening.stage
            ]
            listening.link.send("go", what, list(self.dispatcher.wanted), looked_into)
            self._listening = None

    def _offered(self, payloads: RowPayloads, provider: str, packed: Any, forms: Sequence[Form]) -> list[Any]:
        """Give blocks a value of another stage; return the changes that they made to it."""
        if provider not in self.dispatcher.wanted:
            return []
        try:
            value = payloads.unpack(packed, forms, self._device)
            return payloads.changes(value, self.dispatcher.offer(provider, None, value))
        except Exception as error:
            logger.exception("a value of another stage could not be shared with traced requests")
            self.dispatcher.fail(provider, error)
            return []

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Continue with the step that ``before`` has begun on the first stage."""
        del num_rows
        begun, self._begun = self._begun, []
        if list(spans) != begun:
            for request in self._active:
                request.failed(StageError.unlike())
                request.wanted.clear()
        return self.in_step

    # Calls of remote modules by blocks.

    def call(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a module of another stage, which must be the stage that is being served.

        Raises:
            StageError: It is not, or the calling code is not the running block's own, or an argument cannot
                be
                sent.
            BaseException: The module raised it.
        """
        listening, mediator = self._listening, self.dispatcher.current
        worker = None if mediator is None else mediator.worker
        if listening is None or listening.stage != stage or worker is None or not worker.is_current():
            raise StageError.call(path, stage)
        refused = RowStore.refusal((args, kwargs))
        if refused is not None:
            raise StageError.argument(path, refused)
        args, kwargs = map_tensors((args, kwargs), plain)
        answers: list[tuple[Any, ...]] = []
        refusals: list[EncodeError] = []

        def exchange() -> None:
            with self._exchange:
                if self._listening is not listening:
                    return  # the block was abandoned meanwhile, and the stage has been answered
                try:
                    listening.link.send("call", (path, args, kwargs), reference=RemoteStageValue.reference)
                except EncodeError as error:
                    refusals.append(error)
                else:
                    answers.append(listening.link.receive(resolve=lambda name: RemoteStageValue(name, stage)))

        # On a separate thread: the block's may be interrupted, and half a message would break the protocol.
        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join()
        if refusals:
            raise StageError.argument(path, str(refusals[0]))
        if not answers:
            raise StageError.call(path, stage)
        _, value, error = answers[0]
        if error is not None:
            raise restore_error(error)
        return map_tensors(value, lambda tensor: tensor.to(self._device))

    def missing_attribute(self, stage: int, path: str, name: str) -> Exception:
        """Return the error for an attribute of a module that exists on another stage only."""
        return StageError.attribute(path, name, stage)


def _span(span_data: Sequence[Any]) -> TraceSpan:
    return TraceSpan(*span_data)
