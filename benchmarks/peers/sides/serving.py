"""What the sides of the part ``serving`` share: requests, the engine's arguments, and how they are timed."""

from __future__ import annotations

from typing import Any, Final

import torch

from benchmarks.peers.tasks import NUM_REQUESTS, SERVING_TASKS, Work, prompt_ids
from benchmarks.precision import DTYPE_NAME
from benchmarks.tracing.timing import CallsByTurns, Sampler

ENGINE_ARGUMENTS: Final[dict[str, Any]] = {"dtype": DTYPE_NAME, "max_model_len": 512}
"""Beside the model and ``enforce_eager``, which interp-engine has by itself where any point may be read."""

_REPETITION_S: Final = 0.3


class ServingSide:
    """A library's work in vLLM.

    Args:
        work: Has a method for each task.
    """

    def __init__(self, work: Any) -> None:
        """Keep the work."""
        self._work = work

    def prepare(self, number: int) -> tuple[Sampler, list[torch.Tensor]]:
        """Return what times a task, and what the library read."""
        work: Work = getattr(self._work, SERVING_TASKS[number].key)
        return CallsByTurns({"library": work}, _REPETITION_S), work()


def prompts() -> list[list[int]]:
    """Return the requests' prompts."""
    return [prompt_ids(seed) for seed in range(NUM_REQUESTS)]
