"""A tensor-parallel rank that runs no block: it executes the leading rank's orders, see ``tp_leader``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnsight_engine.serialization.message.table import Piece
from nnsight_engine.vllm_backend.traces.messages import CallOrder
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.ranks import ContinueOrder, FetchOrder, Ranks
from nnsight_engine.vllm_backend.traces.step_facts import StepFacts
from nnsight_engine.vllm_backend.traces.tp_collectives import TpCollectives
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.request import TraceSpan

logger = logging.getLogger(__name__)


class TpFollowerDispatcher(TraceDispatcher):
    """Stops the model where the leading rank's blocks may read or change a value."""

    spread: TpCollectives

    def __init__(self) -> None:
        super().__init__()
        self.undone: Sequence[str] = ()
        self._is_true = False

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - as on the other side
        return self.follow(provider, value)

    def follow(self, provider: str = "", value: Any = None) -> Any:
        """Execute the leading rank's orders until it lets the model continue."""
        ranks = self.spread.ranks
        while True:
            order, content = ranks.next_order()
            if isinstance(order, ContinueOrder):
                self._is_true, self.undone = order.is_true, order.undone
                # Probes hold a reference to this dictionary, so it is changed in place.
                self.wanted.clear()
                self.wanted.update({name: {} for name in order.wanted or ()})
                changed = {slot.number: content.next(slot) for slot in order.changes}
                return self.spread.with_parts(provider, value, changed) if changed else value
            if isinstance(order, CallOrder):
                self._call(order, *content.arguments(order))
            elif isinstance(order, FetchOrder):
                self.spread.fetch(order.path, order.name)
            else:
                self.spread.whole(provider, value)

    def follow_to_answer(self) -> bool:
        """Execute the leading rank's orders, and return the answer with which it lets the model continue."""
        self.follow()
        return self._is_true

    def _call(self, order: CallOrder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Calls made inside do not count as the model's own calls.
        listener, self.listener = self.listener, 0
        try:
            self.spread.call(order.path, order.method, args, kwargs, order.adapter)
        except Exception:
            # The leading rank raises the same error in the block.
            logger.debug("a module could not be called for a block", exc_info=True)
        finally:
            self.listener = listener


class TpFollowerTraces(PeerTraces):
    """Executes the leading rank's orders in each phase in which that rank may send some."""

    dispatcher: TpFollowerDispatcher

    def __init__(self, points: ModelPoints, config: VllmConfig, ranks: Ranks) -> None:
        dispatcher = TpFollowerDispatcher()
        super().__init__(dispatcher, WorkerModel(points, config, dispatcher))
        dispatcher.spread = TpCollectives(ranks, self.model, points)

    @property
    def undone(self) -> Sequence[str]:
        return self.dispatcher.undone

    def begin(self, facts: StepFacts) -> None:
        if self.known.note(facts) or self.known.sandboxed:
            self.dispatcher.follow()

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        del num_rows
        if spans:
            self.in_step = self.dispatcher.follow_to_answer()
            self.defers = not self.known.sandboxed.isdisjoint(span.request_id for span in spans)
        return self.in_step

    def end(self) -> list[str]:
        if self.known.sandboxed:
            self.dispatcher.follow()
        self.in_step = self.defers = False
        self.dispatcher.undone = ()
        self.dispatcher.wanted.clear()
        return []

    def wait_for_any(self, wait_s: float) -> None:
        del wait_s
        if self.known.sandboxed:
            self.dispatcher.follow()

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        del key, results, wait_s
        return self.dispatcher.follow_to_answer()

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:
        self.dispatcher.follow()
        return super().collect(key, results, index)

    def drop(self, key: str) -> None:
        self.dispatcher.follow()
        super().drop(key)
