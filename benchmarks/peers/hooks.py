"""The tasks with PyTorch's hooks, the reference of every library, in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.peers.tasks import NUM_TOKENS, Subject


class HookWork:
    """The tasks on one model, which nothing else may have hooked or wrapped."""

    def __init__(self, subject: Subject) -> None:
        """Keep the model."""
        self._subject = subject
        self._module = subject.module
        self._layers = list(subject.layers_of(subject.module))
        self._layer = self._layers[subject.layer]

    def one_value(self) -> list[torch.Tensor]:
        """Keep what one layer returns."""
        return self._kept([self._layer], self._subject.inputs)

    def all_values(self) -> list[torch.Tensor]:
        """Keep what every layer returns."""
        return self._kept(self._layers, self._subject.inputs)

    shared_invokes = all_values

    def one_write(self) -> list[torch.Tensor]:
        """Add a vector to what one layer returns."""
        vector = self._subject.vector
        with torch.no_grad(), hooked([self._layer], lambda output: output + vector):
            return [self._subject.result_of(self._module(self._subject.inputs))]

    def batched_invokes(self) -> list[torch.Tensor]:
        """Keep what one layer returns for each row of a batch."""
        (hidden,) = self._kept([self._layer], torch.cat(self._subject.prompts))
        return list(hidden.split(1))

    def generation(self) -> list[torch.Tensor]:
        """Generate greedily and keep what one layer returns at each step."""
        kept: list[torch.Tensor] = []
        ids = self._subject.inputs
        with hooked([self._layer], kept.append):
            self._module.generate(ids, attention_mask=torch.ones_like(ids), **generation_options())
        return [torch.cat(kept, 1)]

    def gradient(self) -> list[torch.Tensor]:
        """Keep the gradient of the result's sum by what one layer returns."""
        kept: list[torch.Tensor] = []
        with hooked([self._layer], lambda output: kept.append(output.requires_grad_())):
            result = self._subject.result_of(self._module(self._subject.inputs))
        result.sum().backward()
        assert kept[0].grad is not None  # noqa: S101 - it requires one
        return [kept[0].grad]

    def _kept(self, layers: Iterable[Any], inputs: torch.Tensor) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with torch.no_grad(), hooked(layers, kept.append):
            self._module(inputs)
        return kept


def generation_options() -> dict[str, Any]:
    """Return what ``generate`` is given: so many tokens, the likeliest each."""
    return {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}


@contextlib.contextmanager
def hooked(layers: Iterable[Any], hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Call ``hook`` with each layer's output; it may return another."""
    handles = [layer.register_forward_hook(lambda _module, _args, output: hook(output)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
