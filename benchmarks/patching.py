"""Activation and attribution patching, the methods of the NNsight paper's Table 1, by traces and by hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from benchmarks.peers.hooks import hooked
from benchmarks.turns import Side
from nnsight_engine import save

_BATCH: Final = 32
_LENGTH: Final = 12
_LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens."""
_POSITION: Final = -1
"""The token whose activations are patched."""


class Patching:
    """Both methods on one model: as it is traced, and its module as it is hooked."""

    def __init__(self, model: Any, module: Any) -> None:
        """Draw a clean and a corrupted batch."""
        self._model, self._module = model, module
        self._clean, self._corrupted = (
            torch.randint(
                _LOWEST_TOKEN, 40_000, (_BATCH, _LENGTH), generator=torch.Generator().manual_seed(seed)
            )
            for seed in (1, 2)
        )

    def activation(self, which: slice) -> dict[str, Side]:
        """Run one batch, and put its MLP outputs at one position into the run of another."""
        model, module, clean, corrupted = self._model, self._module, self._clean, self._corrupted
        modules = [layer.mlp for layer in module.model.layers[which]]
        envoys = [layer.mlp for layer in model.model.layers[which]]

        def hooks() -> list[torch.Tensor]:
            kept: list[torch.Tensor] = []

            def patch(output: torch.Tensor) -> torch.Tensor:
                output[:, _POSITION] = kept.pop(0)
                return output

            with torch.no_grad():
                with hooked(modules, lambda output: kept.append(output[:, _POSITION])):
                    module(clean)
                with hooked(modules, patch):
                    logits = module(corrupted).logits
            return [logits[:, _POSITION]]

        def ours() -> list[torch.Tensor]:
            with torch.no_grad():
                with model.trace(clean):
                    kept = save([mlp.output[:, _POSITION] for mlp in envoys])
                with model.trace(corrupted):
                    for mlp, value in zip(envoys, kept, strict=True):
                        mlp.output[:, _POSITION] = value
                    logits = model.output.logits.save()
            return [logits[:, _POSITION]]

        return _checked(ours, hooks)

    def attribution(self) -> dict[str, Side]:
        """Estimate what patching each MLP would do: the difference of the runs times the gradient."""
        model, module, clean, corrupted = self._model, self._module, self._clean, self._corrupted
        layers = module.model.layers

        def hooks() -> list[torch.Tensor]:
            kept: list[torch.Tensor] = []
            attributions: list[torch.Tensor] = []

            def attribute(output: torch.Tensor) -> None:
                value = kept.pop(0)
                output.register_hook(
                    lambda gradient: attributions.append(((value - output) * gradient).sum(-1))
                )

            modules = [layer.mlp for layer in layers]
            with torch.no_grad(), hooked(modules, kept.append):
                module(clean)
            with (
                hooked([module.model.embed_tokens], lambda output: output.requires_grad_()),
                hooked(modules, attribute),
            ):
                logits = module(corrupted).logits
            _metric(logits).backward()
            return attributions

        def ours() -> list[torch.Tensor]:
            with torch.no_grad(), model.trace(clean):
                kept = save([layer.mlp.output for layer in model.model.layers])
            with model.trace(corrupted):
                model.model.embed_tokens.output.requires_grad_()
                outputs = [layer.mlp.output for layer in model.model.layers]
                metric = _metric(model.output.logits)
                attributions = save([])
                with metric.backward():
                    for output, value in zip(reversed(outputs), reversed(kept), strict=True):
                        attributions.append(((value - output) * output.grad).sum(-1))
            return attributions

        return _checked(ours, hooks)


def _metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, _POSITION, 1000] - logits[:, _POSITION, 2000]).float().sum()


def _checked(
    ours: Callable[[], list[torch.Tensor]], hooks: Callable[[], list[torch.Tensor]]
) -> dict[str, Side]:
    check_same(ours(), hooks())
    return {"ours": ours, "hooks": hooks}


def check_same(ours: list[torch.Tensor], hooks: list[torch.Tensor]) -> None:
    """Refuse to time sides that differ in what they compute."""
    if not all(torch.equal(first, second) for first, second in zip(ours, hooks, strict=True)):
        raise AssertionError("the trace and the hooks must compute the same, and do not")
