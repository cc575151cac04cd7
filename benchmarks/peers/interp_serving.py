"""interp-engine's calls on its backend in vLLM, the one that takes any point of any request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.tasks import ENGINE_ARGUMENTS, LAYER, NUM_TOKENS, SERVED, Size, prompts, steering_vector


class InterpWork:
    """The requests, all at once in one event loop."""

    def __init__(self, library: Any, path: Path) -> None:
        """Start the engine."""
        self._runner = asyncio.Runner()
        self._model = self._runner.run(_started(library, path))
        self._prompts = prompts()
        self._point = f"resid_post.{LAYER}"
        operation = library.AddSpec(steering_vector(self._model.d_model), 1.0)
        self._steering = library.SteeringSpec({LAYER: library.LayerSteeringSpec([operation])})

    def idle(self) -> list[torch.Tensor]:
        """Generate."""
        self._gathered([self._generated(prompt) for prompt in self._prompts])
        return []

    def one_reads(self) -> list[torch.Tensor]:
        """Capture one layer's output of the first request."""
        others = [self._generated(prompt) for prompt in self._prompts[1:]]
        return [self._gathered([self._captured(self._prompts[0], None), *others])[0]]

    def all_read(self) -> list[torch.Tensor]:
        """Capture one layer's output of all requests."""
        return self._gathered([self._captured(prompt, None) for prompt in self._prompts])

    def all_steered(self) -> list[torch.Tensor]:
        """Steer one layer of all requests, and capture its output."""
        return self._gathered([self._captured(prompt, self._steering) for prompt in self._prompts])

    async def _generated(self, prompt: list[int]) -> None:
        await self._model.generate_text(prompt, max_tokens=NUM_TOKENS, temperature=0.0)

    async def _captured(self, prompt: list[int], steering: Any) -> torch.Tensor:
        _, captured = await self._model.capture_generation(
            prompt, [self._point], max_tokens=NUM_TOKENS, temperature=0.0, steering_spec=steering
        )
        (hidden,) = captured.values()
        value: torch.Tensor = hidden
        return value

    def _gathered(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def gather() -> list[Any]:
            return list(await asyncio.gather(*calls))

        return self._runner.run(gather())


async def _started(library: Any, path: Path) -> Any:
    """Make the model, which wants a running event loop for itself."""
    model = library.VLLMModel(str(path), **ENGINE_ARGUMENTS)
    await model.warmup()
    return model


def works(library: Any, path: Path) -> dict[Size, InterpWork]:
    """Return the tasks."""
    return {SERVED: InterpWork(library, path)}
