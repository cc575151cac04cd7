"""A tensor-parallel rank that runs no block: it does what the first one says, see ``tp_leader``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnsight_engine.serialization.message import Piece
from nnsight_engine.vllm_backend.traces.points import LOGITS
from nnsight_engine.vllm_backend.traces.ranks import CallMessage, Fetch, GoOn, Order, Ranks
from nnsight_engine.vllm_backend.traces.tp_collectives import Presence, TpCollectives
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
    """Stops where the leading rank's blocks may have their hand in.

    Attributes:
        traced: Whether some block takes part in the step.
    """

    spread: TpCollectives

    def __init__(self) -> None:
        """Start without a place to stop at."""
        super().__init__()
        self.traced = False

    def offer(self, provider: str, number: int | None, value: Any) -> Any:  # noqa: ARG002 - as on the other side
        """Do what the leading rank says; returns this rank's part of what the blocks leave."""
        return self.follow(provider, value)

    def follow(self, provider: str = "", value: Any = None) -> Any:
        """Do what the leading rank says, until it lets the model go on."""
        ranks = self.spread.ranks
        while True:
            order = ranks.hear()
            if isinstance(order, GoOn):
                self.traced = order.traced
                # Probes hold on to this very dictionary.
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
        # What runs inside is none of the model's own calls.
        listener, self.listener = self.listener, 0
        try:
            self.spread.call(order.path, order.method, args, kwargs)
        except Exception:
            # It is raised on the leading rank as well, and there in the block.
            logger.debug("a module could not be called for a block", exc_info=True)
        finally:
            self.listener = listener


class TpFollowerTraces(Presence, WorkerTraces):
    """The traced requests of a model, on a rank that runs none of their blocks."""

    board: TpFollowerDispatcher

    def __init__(self, points: ModelPoints, config: VllmConfig, ranks: Ranks, limits: EngineLimits) -> None:
        """Start without requests."""
        super().__init__(points, config, limits, board=TpFollowerDispatcher())
        self.board.spread = TpCollectives(ranks, self.model, points)
        self._in_step = False

    def prepare_sandbox(self) -> bool:
        """Leave it to the leading rank, which says why there is none."""
        return True

    def hold(self, key: str, data: bytes) -> None:
        """Do nothing: blocks are read by the leading rank."""

    def adopt(self, data: bytes) -> None:
        """Do nothing: names are for blocks."""

    def keep_edit(self, name: str, data: bytes) -> None:
        """Do nothing: edits are blocks."""

    def begin(self, arrived: Sequence[tuple[str, Any]], finished: set[str]) -> None:
        """Follow while blocks of requests that arrived are opened."""
        if self._met(arrived, finished):
            self.board.follow()

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:  # noqa: ARG002 - as on the other side
        """Follow while a step begins; tells whether some block takes part in it."""
        if spans:
            self.board.follow()
            self._in_step = self.board.traced
        return self._in_step

    @property
    def in_step(self) -> bool:
        """Whether some block takes part in the running step."""
        return self._in_step

    def on_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Follow at the logits; returns them as the blocks leave them."""
        value: torch.Tensor = self.board.provide(f"{self.model.path}.{LOGITS}.output", logits)
        return value

    def end(self) -> list[str]:
        """End the step; the leading rank tells which requests are to end."""
        self._in_step = False
        self.board.wanted.clear()
        return []

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:  # noqa: ARG002 - as on the other side
        """Follow while a trace is closed; nothing is returned from here."""
        self.board.follow()
        return []

    def drop(self, key: str) -> None:  # noqa: ARG002 - as on the other side
        """Follow while a trace is closed."""
        self.board.follow()
