"""The tasks with interp-engine's calls, on its eager backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.tasks import LANGUAGE, NUM_TOKENS, Models, Size, Subject, language_subject
from benchmarks.precision import DTYPE_NAME


class InterpWork:
    """The tasks on a language model."""

    def __init__(self, library: Any, subject: Subject, path: Path) -> None:
        """Wrap the model."""
        self._library, self._subject, self._path = library, subject, path
        self._model = self._wrapped(subject.module)
        self._differentiable: Any = None
        self._point = f"resid_post.{subject.layer}"
        operation = library.AddSpec(subject.vector, 1.0)
        self._steering = library.SteeringSpec({subject.layer: library.LayerSteeringSpec([operation])})

    def one_value(self) -> list[torch.Tensor]:
        """Capture one layer's output."""
        cache = self._library.capture(self._model, self._subject.inputs, [self._point])
        return [cache[self._point]]

    def all_values(self) -> list[torch.Tensor]:
        """Capture every layer's output."""
        points = [f"resid_post.{layer}" for layer in range(self._subject.num_layers)]
        cache = self._library.capture(self._model, self._subject.inputs, points)
        return [cache[point] for point in points]

    def one_write(self) -> list[torch.Tensor]:
        """Steer one layer's output."""
        with self._library.steer(self._model, self._steering):
            cache = self._library.capture(self._model, self._subject.inputs, [])
        return [self._subject.result_of(cache.output)]

    def batched_invokes(self) -> list[torch.Tensor]:
        """Capture one layer's output of a batch, which has no blocks of its own for each row."""
        cache = self._library.capture(self._model, torch.cat(self._subject.prompts), [self._point])
        hidden: torch.Tensor = cache[self._point]
        return list(hidden.split(1))

    def generation(self) -> list[torch.Tensor]:
        """Generate greedily and capture one layer's output."""
        points, count = [self._point], NUM_TOKENS
        _, cache = self._library.capture_generation(
            self._model, self._subject.inputs, points, max_tokens=count, temperature=0.0
        )
        return [cache[self._point]]

    def gradient(self) -> list[torch.Tensor]:
        """Capture one layer's output in the graph and ask for the gradient by it."""
        if self._differentiable is None:
            # It keeps a graph only below weights that want gradients.
            module = language_subject(self._path).module.requires_grad_(requires_grad=True)
            self._differentiable = self._wrapped(module, requires_grad=True)
        points = [self._point]
        cache = self._library.capture(self._differentiable, self._subject.inputs, points, detach=False)
        total = self._subject.result_of(cache.output).sum()
        return list(torch.autograd.grad(total, cache[self._point]))

    def _wrapped(self, module: Any, **options: Any) -> Any:
        return self._library.EagerModel(
            str(self._path),
            hf_model=module,
            device="cpu",
            dtype=DTYPE_NAME,
            attn_implementation="sdpa",
            **options,
        )


def works(library: Any, models: Models) -> dict[Size, InterpWork]:
    """Return the tasks on the only kind of model that it takes."""
    return {LANGUAGE: InterpWork(library, models.subjects[LANGUAGE], models.path)}
