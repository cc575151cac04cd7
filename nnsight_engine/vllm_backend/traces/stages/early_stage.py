"""A pipeline stage other than the last: offers its values to the blocks' stage, see ``last_stage``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.serialization import decode, encode_error
from nnsight_engine.serialization.values import encode_pieces
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters, block_adapters
from nnsight_engine.vllm_backend.traces.errors import StageError
from nnsight_engine.vllm_backend.traces.messages import (
    ALL_DTYPES,
    CallOrder,
    CallResult,
    End,
    InvalidValue,
    PassedPlaces,
    Tensors,
    packed,
    packed_value,
    unpacked,
)
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.remote_modules import described, spanning_paths
from nnsight_engine.vllm_backend.traces.row_payloads import RowPayloads, RowsPlaceholder, RowStore
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.stages.messages import (
    StageOffer,
    StageReply,
    StageStep,
    by_early_stage,
)
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.request import TraceSpan
    from nnsight_engine.vllm_backend.traces.stages.links import Channel

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
