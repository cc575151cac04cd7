"""A stage of a pipeline other than the last: it offers what blocks want to the stage where they run.

``EarlyStageTraces`` takes the place of ``WorkerTraces`` on such a stage, and its board the place of the one
where the model's calls meet the requests. See ``last_stage`` for who speaks when.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.serialization import encode_error
from nnsight_engine.vllm_backend.model_outline import OutlineEntry
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.reporting import Parcel
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.stages.remote_modules import described, spanning_paths
from nnsight_engine.vllm_backend.traces.stages.row_payloads import KeptRows, RowKeeper, RowPayloads
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.families import ModelPoints
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.stages.links import Channel

logger = logging.getLogger(__name__)


class EarlyStageDispatcher(TraceDispatcher):
    """Where this stage's model meets the blocks of the last one: what they want is offered to them."""

    model: WorkerModel

    def __init__(self, link: Channel, shared: Sequence[str]) -> None:
        """Offer through ``link`` all but what modules return that later stages go on with."""
        super().__init__()
        self._link = link
        self._shared = {f"{path}.output" for path in shared}
        self._keeper = RowKeeper()
        self._num_told = 0
        self._parcels: RowPayloads | None = None

    def open(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Begin a step; returns whether a block takes part in it."""
        self.begin()
        self._num_told = 0
        told = [
            (span.request_id, span.index, span.row, span.num_rows, span.start, span.complete)
            for span in spans
        ]
        self._link.send("begin", told, num_rows)
        live = set(self._answer())
        self._parcels = RowPayloads([span for span in spans if span.request_id in live], num_rows)
        self.interleaving = bool(live)
        return self.interleaving

    def close(self) -> None:
        """End this stage's part of the step."""
        self.end()
        self.wanted.clear()
        self._keeper.clear()
        self._link.send("done", self._passed())

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - counted where blocks run
        """Let the blocks that wait have a value; returns it as they leave it."""
        if provider in self._shared:
            return value
        parcels = self._parcels
        assert parcels is not None  # noqa: S101 - a step is running
        kept = self._keeper.keep(value)
        passed = self._passed()
        try:
            self._link.send("offer", passed, provider, *parcels.pack(kept), reference=KeptRows.reference)
        except Exception as error:
            logger.exception("a value cannot be sent to the blocks that wait for it")
            self._link.send("broken", passed, provider, f"`{provider}` cannot be sent: {error}")
        changes = self._answer()
        if not changes:
            return value
        return self._keeper.give_back(parcels.changed(kept, [tuple(change) for change in changes]))

    def _passed(self) -> list[str]:
        """Return the providers reached that the other side has not been told of."""
        new = list(self.calls)[self._num_told :]
        self._num_told = len(self.calls)
        return [provider for provider in new if provider not in self._shared]

    def _answer(self) -> Any:
        """Wait for an answer, making the calls that blocks want made; returns what it says."""
        while True:
            kind, *rest = self._link.receive(resolve=self._keeper.resolve)
            if kind == "call":
                self._call(*rest[0])
                continue
            what, wanted, sources = rest
            # Probes hold on to this very dictionary.
            self.wanted.clear()
            self.wanted.update({provider: {} for provider in wanted})
            for path in sources:
                self._look_into(path)
            return what

    def _look_into(self, path: str) -> None:
        """Hear of the operations inside a module's forward, as blocks ask for them."""
        try:
            self.model.get(path).source  # noqa: B018 - asking is what installs it
        except Exception:
            logger.exception("the source of %s cannot be had on this stage", path)

    def _call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a module for a block."""
        listener, self.listener = self.listener, 0
        try:
            device = self.model.device or torch.device("cpu")
            here = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
            value = self._keeper.keep(map_tensors(self.model.get(path)(*here[0], **here[1]), plain))
            self._link.send("called", value, None, reference=KeptRows.reference)
        except Exception as error:  # noqa: BLE001 - raised in the block
            self._link.send("called", None, encode_error(error))
        finally:
            self.listener = listener


class EarlyStageTraces:
    """The traced requests of a pipeline, on a stage other than the last; see ``WorkerTraces``.

    Args:
        points: The points of the model, of which this stage has a part.
        config: vLLM's.
        link: The way to the last stage.
    """

    in_step = False
    """No logits here."""

    by_taps = False
    """All stages would have to agree."""

    def __init__(self, points: ModelPoints, config: VllmConfig, link: Channel) -> None:
        """Tell the last stage what modules there are."""
        paths = [f".{path}" if path else "" for path in spanning_paths(points.family.layers)]
        self.board = EarlyStageDispatcher(link, [f"model{path}" for path in paths])
        self.model = self.board.model = WorkerModel(points, config, self.board)
        self._registered: set[str] = set()
        link.send(described(points.model))

    @property
    def idle(self) -> bool:
        """Whether no traced request is known."""
        return not self._registered

    def begin(self, arrived: Sequence[tuple[str, Any]], finished: set[str]) -> None:
        """Take note of who came and who went."""
        self._registered -= finished
        self._registered.update(request_id for request_id, _ in arrived)

    def takes_part(self, request_id: str) -> bool:
        """Tell whether a request is traced."""
        return request_id in self._registered

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Begin a step for these requests; False if no block takes part in it."""
        return bool(spans) and self.board.open(spans, num_rows)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Hear of the modules' calls while the model runs."""
        try:
            with self.model.heard(self.board):
                yield
        finally:
            self.board.close()

    def end(self) -> list[str]:
        """End the step; the last stage says which requests are over."""
        return []

    # Blocks are where the last stage is: nothing is left here.

    def news(self) -> dict[str, Parcel]:
        """Return nothing."""
        return {}

    def outline(self) -> list[OutlineEntry]:
        """Return nothing: the last stage knows the modules of all."""
        return []

    def num_live(self) -> dict[str, int]:
        """Return nothing: the last stage counts."""
        return {}

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> bytes:
        """Return nothing."""
        del key, results, index
        return b""

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        """Tell whether there is nothing to wait for."""
        del key, results, wait_s
        return True

    def count_sandboxes(self) -> dict[str, int]:
        """Return nothing: the last stage counts."""
        return {}

    def prepare_sandbox(self) -> bool:
        """Leave it to the last stage, which says why there is none."""
        return True

    def hold(self, key: str, data: bytes) -> None:
        """Do nothing: blocks are read elsewhere."""

    def adopt(self, data: bytes) -> None:
        """Do nothing: names are for blocks."""

    def keep_edit(self, name: str, data: bytes) -> None:
        """Do nothing: edits are blocks."""

    def remove_edit(self, name: str) -> None:
        """Do nothing."""

    def drop(self, key: str) -> None:
        """Do nothing."""
