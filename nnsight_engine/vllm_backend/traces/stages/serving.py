"""The last stage of a pipeline: blocks run here, and are given what the stages before it offer.

There is one copy of each block, so nothing has to be repeated alike on several stages, and what it saves and
raises is there once. Before the last stage begins its own part of a step with traced requests, it serves the
others in the order in which the step passes them: each says whose rows are whose, is told what is wanted,
offers what it reaches of that, goes on with what it gets back, and says when it is done. Whether a step has
such requests both sides know from what the engine schedules: there is always one who speaks and one who
listens. Steps may follow each other closely in the pipeline: a stage that is ahead waits until it is heard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.vllm_backend.outline import OutlineEntry, outline_of
from nnsight_engine.vllm_backend.traces.errors import StageError
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.stages.elsewhere import (
    ModuleElsewhere,
    SpanningEnvoy,
    stand_ins,
)
from nnsight_engine.vllm_backend.traces.stages.parcels import Form, Parcels, ValueElsewhere
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces
from nnsight_engine.wire import restore_error

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.families import ModelPoints
    from nnsight_engine.vllm_backend.traces.stages.links import Channel

logger = logging.getLogger(__name__)


class PipelineModel(SpanningEnvoy, WorkerModel):
    """What ``model`` is in a block on the last stage: the modules of all of them."""


class ServingTraces(WorkerTraces):
    """The traced requests of a pipeline, on its last stage.

    Args:
        points: The points of the model, of which this stage has the last part.
        config: vLLM's.
        links: The ways to the stages before, in order.
        budget_s: Seconds that one block may compute within one step.
    """

    def __init__(
        self, points: ModelPoints, config: VllmConfig, links: Sequence[Channel], *, budget_s: float
    ) -> None:
        """Learn what modules the others have."""
        self._links = links
        self._serving: tuple[int, Channel] | None = None
        self._exchange = threading.Lock()
        self._registered: set[str] = set()
        self._begun: list[TraceSpan] = []
        self._device = next(points.model.parameters()).device
        stages = [link.receive()[0] for link in links]
        self.elsewhere = stand_ins(points.model, stages, self)
        super().__init__(points, config, budget_s=budget_s)

    def _new_model(self, points: ModelPoints, config: VllmConfig) -> WorkerModel:
        return PipelineModel(points, config, self.board, self.elsewhere)

    def outline(self) -> list[OutlineEntry]:
        """List the modules of all stages."""
        return outline_of(self.model._module, self.elsewhere)  # noqa: SLF001 - an envoy of ours

    # A step.

    @torch.inference_mode()
    def before(
        self, scheduled: Collection[str], arrived: Sequence[tuple[str, Any]], finished: set[str]
    ) -> None:
        """Serve the stages before this one, if traced requests are in the step.

        Args:
            scheduled: All requests in it.
            arrived: Those that are traced and new.
            finished: All that have ended.
        """
        self._registered -= finished
        self._registered.update(request_id for request_id, _ in arrived)
        if arrived or not self.idle:
            self.begin(arrived, finished)
        if self._registered.isdisjoint(scheduled):
            return
        for stage, link in enumerate(self._links):
            self._serving = (stage, link)
            try:
                self._serve(stage, link)
            finally:
                self._serving = None

    def _serve(self, stage: int, link: Channel) -> None:
        _, told, num_rows = link.receive()
        spans = [TraceSpan(*span) for span in told]
        live = [span for span in spans if self.takes_part(span.request_id)]
        if stage == 0:
            self._begun = live
            super().step(live, num_rows)
        parcels = Parcels(live, num_rows)
        self._say(link, stage, "go", [span.request_id for span in live])
        while live:
            kind, passed, *rest = link.receive(resolve=lambda name: ValueElsewhere(name, stage))
            self.board.calls.update(dict.fromkeys(passed, 1))
            if kind == "done":
                return
            if kind == "offer":
                self._say(link, stage, "take", self._offered(parcels, *rest))
            else:
                provider, message = rest
                self._fail(provider, StageError(message))
                self._say(link, stage, "take", [])

    def _say(self, link: Channel, stage: int, kind: str, what: Any) -> None:
        """Answer a stage, with all that is wanted now and the modules whose operations are looked at."""
        looked_into = [one for one in self.model._sources if _is_of(stage, one.module)]  # noqa: SLF001 - ours
        sources = [str(one.source.path) for one in looked_into]
        with self._exchange:
            link.send(kind, what, list(self.board.wanted), sources)

    def _offered(self, parcels: Parcels, provider: str, packed: Any, forms: Sequence[Form]) -> list[Any]:
        """Let blocks have a value of another stage; returns what they replaced in it."""
        if provider not in self.board.wanted:
            return []
        try:
            value = parcels.unpack(packed, forms, self._device)
            return parcels.changes(value, self.board.offer(provider, None, value))
        except Exception as error:
            logger.exception("a value of another stage could not be shared with traced requests")
            self._fail(provider, error)
            return []

    def _fail(self, provider: str, error: Exception) -> None:
        for request in list(self.board.wanted.get(provider, ())):
            request.failed(error)
            request.wanted.clear()

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Go on with the step that the first stage has begun."""
        del num_rows
        begun, self._begun = self._begun, []
        if list(spans) != begun:
            for request in self._active:
                request.failed(StageError.unlike())
                request.wanted.clear()
        return self.in_step

    # Calls that blocks make of modules elsewhere.

    def call(self, stage: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a module of another stage gives, which must be the one that is being served.

        Raises:
            StageError: It is not.
            BaseException: What the module raised.
        """
        if self._serving is None or self._serving[0] != stage:
            raise StageError.call(path, stage)
        _, link = self._serving
        answers: list[tuple[Any, ...]] = []

        def exchange() -> None:
            with self._exchange:
                link.send("call", (path, args, kwargs), reference=ValueElsewhere.reference)
                answers.append(link.receive(resolve=lambda name: ValueElsewhere(name, stage)))

        # On a thread of its own: the block's may be interrupted, and half a message would confuse both sides.
        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join()
        _, value, error = answers[0]
        if error is not None:
            raise restore_error(error)
        return map_tensors(value, lambda tensor: tensor.to(self._device))


def _is_of(stage: int, module: torch.nn.Module) -> bool:
    return isinstance(module, ModuleElsewhere) and module.stage == stage
