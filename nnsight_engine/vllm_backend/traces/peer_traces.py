"""A rank or stage that runs no blocks: it offers its part of the model's values to the worker that does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.envoys.architectures.named_points import LOGITS
from nnsight_engine.serialization.message import Piece
from nnsight_engine.vllm_backend.module_tree import OutlineEntry
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.points import SAMPLES
from nnsight_engine.vllm_backend.traces.reporting import Report
from nnsight_engine.vllm_backend.traces.step_facts import KnownRequests, StepFacts
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.request import TraceSpan


class PeerTraces:
    """The other worker reports waiting and throttled requests and times: they are always empty or 0 here."""

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
        return not self.known.present

    @property
    def undone(self) -> Sequence[str]:
        return ()

    def takes_part(self, request_id: str) -> bool:
        return request_id in self.known.present

    # A step.

    def before(self, facts: StepFacts) -> None: ...

    def begin(self, facts: StepFacts) -> None:
        self.known.note(facts)

    def step(self, spans: Sequence[TraceSpan], num_rows: int) -> bool:
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.dispatcher.go_by_modules()
        with self.model.observed_by(self.dispatcher):
            yield

    def on_logits(self, logits: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.dispatcher.provide(f"{self.model.path}.{LOGITS}.output", logits)
        return value

    def on_samples(self, samples: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.dispatcher.provide(f"{self.model.path}.{SAMPLES}.output", samples)
        return value

    def end(self) -> list[str]:
        return []

    def wait_for_any(self, wait_s: float) -> None: ...

    # Blocks and results, which another worker has.

    def reports(self) -> dict[str, Report]:
        return {}

    def outline(self) -> list[OutlineEntry]:
        return []

    def num_live(self) -> dict[str, int]:
        return {}

    def collect(self, key: str, results: Mapping[str, Any], index: int | None = None) -> list[Piece]:
        del key, results, index
        return []

    def has_collected(self, key: str, results: Mapping[str, Any], wait_s: float) -> bool:
        del key, results, wait_s
        return True

    def drop(self, key: str) -> None: ...

    def count_sandboxes(self) -> dict[str, int]:
        return {}

    def hold(self, key: str, data: bytes) -> None: ...

    def adopt(self, data: bytes) -> None: ...

    def keep_edit(self, name: str, data: bytes) -> None: ...

    def remove_edit(self, name: str) -> None: ...
