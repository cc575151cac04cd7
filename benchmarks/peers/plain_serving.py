"""Plain vLLM, which reads nothing: the reference of the others in all tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from benchmarks.peers.tasks import ENGINE_ARGUMENTS, NUM_TOKENS, SERVED, Size, prompts


class PlainWork:
    """The requests, for every task."""

    def __init__(self, path: Path) -> None:
        """Start the engine."""
        self._engine = LLM(str(path), enforce_eager=True, **ENGINE_ARGUMENTS)
        self._params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        self._prompts = [{"prompt_token_ids": ids} for ids in prompts()]

    def idle(self) -> list[torch.Tensor]:
        """Generate."""
        self._engine.generate(self._prompts, self._params, use_tqdm=False)
        return []

    one_reads = all_read = all_steered = idle


def works(_library: Any, path: Path) -> dict[Size, PlainWork]:
    """Return the tasks."""
    return {SERVED: PlainWork(path)}
