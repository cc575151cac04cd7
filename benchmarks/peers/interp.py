"""The tasks with interp-engine's calls: on its eager backend, and on its backend in vLLM for any point."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.tasks import (
    ENGINE_ARGUMENTS,
    LANGUAGE,
    LAYER,
    NUM_TOKENS,
    SERVED,
    Size,
    Subject,
    Works,
    language_subject,
    prompts,
    steering_vector,
)
from benchmarks.precision import DTYPE_NAME


def local_works(library: Any, subjects: dict[Size, Subject], path: Path) -> dict[Size, Works]:
    """Return the tasks on the only kind of model that it takes."""
    subject, point = subjects[LANGUAGE], f"resid_post.{LAYER}"
    inputs, capture = subject.inputs, library.capture

    def wrapped(module: Any, **options: Any) -> Any:
        options |= {"device": "cpu", "dtype": DTYPE_NAME, "attn_implementation": "sdpa"}
        return library.EagerModel(str(path), hf_model=module, **options)

    model, steering = wrapped(subject.module), _steering(library, subject.vector)
    # It keeps a graph only below weights that want gradients.
    module = language_subject(path).module.requires_grad_(requires_grad=True)
    differentiable = wrapped(module, requires_grad=True)

    def one_value() -> list[torch.Tensor]:
        return [capture(model, inputs, [point])[point]]

    def all_values() -> list[torch.Tensor]:
        points = [f"resid_post.{layer}" for layer in range(subject.num_layers)]
        cache = capture(model, inputs, points)
        return [cache[one] for one in points]

    def one_write() -> list[torch.Tensor]:
        with library.steer(model, steering):
            return [subject.result_of(capture(model, inputs, []).output)]

    def batched_invokes() -> list[torch.Tensor]:
        hidden: torch.Tensor = capture(model, torch.cat(subject.prompts), [point])[point]
        return list(hidden.split(1))

    def generation() -> list[torch.Tensor]:
        _, cache = library.capture_generation(model, inputs, [point], max_tokens=NUM_TOKENS, temperature=0.0)
        return [cache[point]]

    def gradient() -> list[torch.Tensor]:
        cache = capture(differentiable, inputs, [point], detach=False)
        return list(torch.autograd.grad(subject.result_of(cache.output).sum(), cache[point]))

    works = (one_value, all_values, one_write, batched_invokes, generation, gradient)
    return {LANGUAGE: {work.__name__: work for work in works}}


def serving_works(library: Any, path: Path) -> dict[Size, Works]:
    """Start the engine and return the tasks, whose requests run all at once in one event loop."""
    runner, ids, point = asyncio.Runner(), prompts(), f"resid_post.{LAYER}"
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0}

    async def started() -> Any:
        model = library.VLLMModel(str(path), **ENGINE_ARGUMENTS)  # wants a running event loop
        await model.warmup()
        return model

    model = runner.run(started())
    steering = _steering(library, steering_vector(model.d_model))

    async def generated(prompt: list[int]) -> None:
        await model.generate_text(prompt, **options)

    async def captured(prompt: list[int], spec: Any = None) -> torch.Tensor:
        _, found = await model.capture_generation(prompt, [point], steering_spec=spec, **options)
        (hidden,) = found.values()
        value: torch.Tensor = hidden
        return value

    def gathered(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def gather() -> list[Any]:
            return list(await asyncio.gather(*calls))

        return runner.run(gather())

    def idle() -> list[torch.Tensor]:
        gathered([generated(prompt) for prompt in ids])
        return []

    def one_reads() -> list[torch.Tensor]:
        return gathered([captured(ids[0]), *(generated(prompt) for prompt in ids[1:])])[:1]

    def all_read() -> list[torch.Tensor]:
        return gathered([captured(prompt) for prompt in ids])

    def all_steered() -> list[torch.Tensor]:
        return gathered([captured(prompt, steering) for prompt in ids])

    return {SERVED: {work.__name__: work for work in (idle, one_reads, all_read, all_steered)}}


def _steering(library: Any, vector: torch.Tensor) -> Any:
    operation = library.AddSpec(vector, 1.0)
    return library.SteeringSpec({LAYER: library.LayerSteeringSpec([operation])})
