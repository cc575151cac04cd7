"""A rank or stage that runs no blocks: it offers its part of the model's values to the worker that does.

For the runner ``PeerTraces`` has the methods of ``WorkerTraces``. Everything about blocks, their results and
their processes is answered by the other worker, so here it is empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.serialization.message.table import Piece
from nnsight_engine.vllm_backend.model_outline import OutlineEntry
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.points import LOGITS, SAMPLES
from nnsight_engine.vllm_backend.traces.reporting import Report
from nnsight_engine.vllm_backend.traces.step_facts import KnownRequests, StepFacts
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.request import TraceSpan


class PeerTraces:
    """The traced requests of a model, on a worker that runs none of their blocks.

    Args:
        dispatcher: The dispatcher of this worker's calls of the model.
        model: The tree of envoys over this worker's part of the model.

    Attributes:
        in_step: Whether some block takes part in the step behind this worker's part of the model.
        defers: Whether the step can continue without the block of some request.
        waiting: Always empty: the worker with the blocks reports which requests wait.
        throttled: Always empty, likewise.
        last_step_s: Always 0: the worker with the blocks measures the time.
    """

    serves_stages = False
    runs_blocks = False
    in_step = False
    defers = False
    waiting: frozenset[str] = frozenset()
    throttled: frozenset[str] = frozenset()
    last_step_s = 0.0

    def __init__(self, dispatcher: TraceDispatcher, model: WorkerModel) -> None:
        self.dispatcher = dispatcher
        self.model = model
        self.known = KnownRequests()

    @property
    def idle(self) -> bool:
        """Whether no traced request is known."""
        return not self.known.present

    @property
    def undone(self) -> Sequence[str]:
        """The requests whose rows of the running step are discarded."""
        return ()

    def takes_part(self, request_id: str) -> bool:
        """Return whether a request is traced."""
        return request_id in self.known.present

    # A step.

    def before(self, facts: StepFacts) -> None:
        """Do nothing: only the last stage serves others before its own part of a step."""

    def begin(self, facts: StepFacts) -> None:
        """Record requests that arrived and finished."""
        self.known.note(facts)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        """Begin a step for these requests; return whether a block takes part in it."""
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Observe the modules' calls while the model runs."""
        self.dispatcher.go_by_modules()
        with self.model.observed_by(self.dispatcher):
            yield

    def on_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Offer the logits, ``[requests, vocabulary]``; return them as the blocks leave them."""
        value: torch.Tensor = self.dispatcher.provide(f"{self.model.path}.{LOGITS}.output", logits)
        return value

    def on_samples(self, samples: torch.Tensor) -> torch.Tensor:
        """Offer the sampled tokens, ``[requests, 1]``; return them as the blocks leave them."""
        value: torch.Tensor = self.dispatcher.provide(f"{self.model.path}.{SAMPLES}.output", samples)
        return value

    def end(self) -> list[str]:
        """End the step; the worker with the blocks reports requests that are to end."""
        return []

    def wait_for_any(self, wait_s: float) -> None:
        """Do nothing: the worker with the blocks waits for sandbox processes."""

    # Blocks and results, which another worker has.

    def reports(self) -> dict[str, Report]:
        """Return no reports."""
        return {}

    def outline(self) -> list[OutlineEntry]:
        """Return no modules: the worker with the blocks lists those of all workers."""
        return []

    def num_live(self) -> dict[str, int]:
        """Return no counts."""
        return {}

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:
        """Return no results."""
        del key, results, index
        return []

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        """Return True: there is nothing to wait for."""
        del key, results, wait_s
        return True

    def drop(self, key: str) -> None:
        """Do nothing: traces are closed where their blocks ran."""

    def count_sandboxes(self) -> dict[str, int]:
        """Return no counts."""
        return {}

    def hold(self, key: str, data: bytes) -> None:
        """Do nothing: blocks are decoded where they run."""

    def adopt(self, data: bytes) -> None:
        """Do nothing: only blocks use a client's names."""

    def keep_edit(self, name: str, data: bytes) -> None:
        """Do nothing: edits are blocks."""

    def remove_edit(self, name: str) -> None:
        """Do nothing: edits are stored where blocks run."""
