"""A tensor-parallel rank that runs no block: it executes the leading rank's orders, see ``tp_leader``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnsight_engine.serialization.message.table import Piece
from nnsight_engine.vllm_backend.traces.points import LOGITS
from nnsight_engine.vllm_backend.traces.ranks import CallMessage, ContinueOrder, Fetch, Order, Ranks
from nnsight_engine.vllm_backend.traces.tp_collectives import TpCollectives, TracedRequestIds
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.families import ModelPoints
    from nnsight_engine.vllm_backend.traces.request import TraceSpan

logger = logging.getLogger(__name__)


class TpFollowerDispatcher(TraceDispatcher):
    """Stops the model at the places where the leading rank's blocks may read or change a value.

    Attributes:
        traced: Whether some block takes part in the step.
    """

    spread: TpCollectives

    def __init__(self) -> None:
        super().__init__()
        self.traced = False

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - as on the other side
        """Execute the leading rank's orders; return this rank's part of the value as the blocks leave it."""
        return self.follow(provider, value)

    def follow(self, provider: str = "", value: Any = None) -> Any:
        """Execute the leading rank's orders until it lets the model continue."""
        ranks = self.spread.ranks
        while True:
            order = ranks.add_event()
            if isinstance(order, ContinueOrder):
                self.traced = order.traced
                # Probes hold a reference to this dictionary, so it is changed in place.
                self.wanted.clear()
                self.wanted.update({name: {} for name in order.wanted})
                changed = {number: ranks.receive(slot) for number, slot in order.changed}
                return self.spread.with_parts(provider, value, changed) if changed else value
            self._obey(order, provider, value)

    def _obey(self, order: Order, provider: str, value: Any) -> None:
        if isinstance(order, CallMessage):
            self._call(order)
        elif isinstance(order, Fetch):
            self.spread.fetch(order.path, order.name)
        else:
            self.spread.whole(provider, value)

    def _call(self, order: CallMessage) -> None:
        args, kwargs = self.spread.ranks.unpacked(order.arguments)
        # Calls made inside do not count as the model's own calls.
        listener, self.listener = self.listener, 0
        try:
            self.spread.call(order.path, order.method, args, kwargs)
        except Exception:
            # The leading rank raises the same error in the block.
            logger.debug("a module could not be called for a block", exc_info=True)
        finally:
            self.listener = listener


class TpFollowerTraces(TracedRequestIds, WorkerTraces):
    """The traced requests of a model, on a rank that runs none of their blocks."""

    dispatcher: TpFollowerDispatcher

    def __init__(self, points: ModelPoints, config: VllmConfig, ranks: Ranks, limits: EngineLimits) -> None:
        super().__init__(points, config, limits, dispatcher=TpFollowerDispatcher())
        self.dispatcher.spread = TpCollectives(ranks, self.model, points)
        self._in_step = False

    def prepare_sandbox(self) -> bool:
        """Return True: the leading rank reports whether a sandbox can be started."""
        return True

    def hold(self, key: str, data: bytes) -> None:
        """Do nothing: the leading rank decodes the blocks."""

    def adopt(self, data: bytes) -> None:
        """Do nothing: only blocks use a client's names."""

    def keep_edit(self, name: str, data: bytes) -> None:
        """Do nothing: edits are blocks, which run on the leading rank."""

    def begin(self, arrived: Sequence[tuple[str, Any]], finished: set[str]) -> None:
        """Execute the leading rank's orders while it opens the blocks of requests that arrived."""
        if self._met(arrived, finished):
            self.dispatcher.follow()

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:  # noqa: ARG002 - as on the other side
        """Execute the leading rank's orders while a step begins; return whether a block takes part in it."""
        if spans:
            self.dispatcher.follow()
            self._in_step = self.dispatcher.traced
        return self._in_step

    @property
    def in_step(self) -> bool:
        """Whether some block takes part in the running step."""
        return self._in_step

    def on_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Stop at the logits for the leading rank; return them as the blocks leave them."""
        value: torch.Tensor = self.dispatcher.provide(f"{self.model.path}.{LOGITS}.output", logits)
        return value

    def end(self) -> list[str]:
        """End the step; only the leading rank reports requests that are to end."""
        self._in_step = False
        self.dispatcher.wanted.clear()
        return []

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:  # noqa: ARG002 - as on the other side
        """Execute the leading rank's orders while it closes a trace; return no results."""
        self.dispatcher.follow()
        return []

    def drop(self, key: str) -> None:  # noqa: ARG002 - as on the other side
        """Execute the leading rank's orders while it closes a trace."""
        self.dispatcher.follow()
