"""vLLM as it comes, which looks into nothing: the reference of the others, whatever they do."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm import LLM, SamplingParams

from benchmarks.peers.sides.serving import ENGINE_ARGUMENTS, ServingSide, prompts
from benchmarks.peers.tasks import NUM_TOKENS


class PlainWork:
    """The requests, for every task.

    Args:
        path: The model's folder.
    """

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


def side(path: Path) -> ServingSide:
    """Return the side."""
    return ServingSide(PlainWork(path))
