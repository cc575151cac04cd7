"""The tasks with PyTorch's hooks, the reference of every library, in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.peers.tasks import Subject, Works, generation_options


def hook_works(subject: Subject) -> Works:
    """Return the tasks on one model, which nothing else may have hooked or wrapped."""
    module, inputs, vector = subject.module, subject.inputs, subject.vector
    layers = list(subject.layers_of(module))
    layer = layers[subject.layer]

    def kept_of(hooked_layers: Iterable[Any], batch: torch.Tensor) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with torch.no_grad(), hooked(hooked_layers, kept.append):
            module(batch)
        return kept

    def one_value() -> list[torch.Tensor]:
        return kept_of([layer], inputs)

    def all_values() -> list[torch.Tensor]:
        return kept_of(layers, inputs)

    def one_write() -> list[torch.Tensor]:
        with torch.no_grad(), hooked([layer], lambda output: output + vector):
            return [subject.result_of(module(inputs))]

    def batched_invokes() -> list[torch.Tensor]:
        (hidden,) = kept_of([layer], torch.cat(subject.prompts))
        return list(hidden.split(1))

    def generation() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with hooked([layer], kept.append):
            module.generate(inputs, attention_mask=torch.ones_like(inputs), **generation_options())
        return [torch.cat(kept, 1)]

    def gradient() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with hooked([layer], lambda output: kept.append(output.requires_grad_())):
            result = subject.result_of(module(inputs))
        result.sum().backward()
        assert kept[0].grad is not None  # noqa: S101 - it requires one
        return [kept[0].grad]

    works = (one_value, all_values, one_write, batched_invokes, generation, gradient)
    return {"shared_invokes": all_values, **{work.__name__: work for work in works}}


@contextlib.contextmanager
def hooked(layers: Iterable[Any], hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Call ``hook`` with each layer's output; it may return another."""
    handles = [layer.register_forward_hook(lambda _module, _args, output: hook(output)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
