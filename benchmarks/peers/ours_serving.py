"""Our blocks in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams

from benchmarks.peers.tasks import ENGINE_ARGUMENTS, LAYER, NUM_TOKENS, SERVED, Size, prompts, steering_vector
from nnsight_engine import save
from nnsight_engine.vllm_backend.vllm import VLLM


class OurWork:
    """The requests, each with a block or without one."""

    def __init__(self, path: Path) -> None:
        """Start the engine."""
        self._model = VLLM(str(path), dispatch=True, enforce_eager=True, **ENGINE_ARGUMENTS)
        self._options: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        self._prompts = prompts()
        self._vector = steering_vector(576)

    def idle(self) -> list[torch.Tensor]:
        """Generate with the engine that could look."""
        plain = [{"prompt_token_ids": ids} for ids in self._prompts]
        self._model.engine.generate(plain, SamplingParams(**self._options), use_tqdm=False)
        return []

    def one_reads(self) -> list[torch.Tensor]:
        """Save one layer's output of the first request."""
        model = self._model
        with model.trace(**self._options) as tracer:
            kept: list[torch.Tensor] = save([])
            with tracer.invoke(self._prompts[0]):
                for _ in tracer.iter[:]:
                    kept.append(model.layers[LAYER].output)  # noqa: PERF401 - a step each
            for prompt in self._prompts[1:]:
                with tracer.invoke(prompt):
                    pass
        return [torch.cat(kept)]

    def all_read(self) -> list[torch.Tensor]:
        """Save one layer's output of all requests."""
        model = self._model
        with model.trace(**self._options) as tracer:
            kept: list[list[torch.Tensor]] = save([[] for _ in self._prompts])
            for number, prompt in enumerate(self._prompts):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        kept[number].append(model.layers[LAYER].output)
        return [torch.cat(own) for own in kept]

    def all_steered(self) -> list[torch.Tensor]:
        """Add a vector to one layer's output of all requests, and save it."""
        model, vector = self._model, self._vector
        with model.trace(**self._options) as tracer:
            kept: list[list[torch.Tensor]] = save([[] for _ in self._prompts])
            for number, prompt in enumerate(self._prompts):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        steered = model.layers[LAYER].output + vector
                        model.layers[LAYER].output = steered
                        kept[number].append(steered)
        return [torch.cat(own) for own in kept]


def works(_library: Any, path: Path) -> dict[Size, OurWork]:
    """Return the tasks."""
    return {SERVED: OurWork(path)}
