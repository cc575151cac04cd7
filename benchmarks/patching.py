"""Activation and attribution patching, the methods of the NNsight paper's Table 1, by traces and by hooks.

Each function returns sides that must compute the same: on a model as it is traced, and on its module as it is
hooked.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from benchmarks.peers.hooks import hooked
from benchmarks.peers.tasks import Work
from nnsight_engine import save

_LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens."""
_CLEAN, _CORRUPTED = (
    torch.randint(_LOWEST_TOKEN, 40_000, (32, 12), generator=torch.Generator().manual_seed(seed))
    for seed in (1, 2)
)
_POSITION: Final = -1
"""The token whose activations are patched."""


def activation_patching(model: Any, module: Any, which: slice) -> dict[str, Work]:
    """Run one batch, and put its MLP outputs at one position into the run of another."""
    modules = [layer.mlp for layer in module.model.layers[which]]
    envoys = [layer.mlp for layer in model.model.layers[which]]

    def hooks() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []

        def patch(output: torch.Tensor) -> torch.Tensor:
            output[:, _POSITION] = kept.pop(0)
            return output

        with torch.no_grad():
            with hooked(modules, lambda output: kept.append(output[:, _POSITION])):
                module(_CLEAN)
            with hooked(modules, patch):
                logits = module(_CORRUPTED).logits
        return [logits[:, _POSITION]]

    def ours() -> list[torch.Tensor]:
        with torch.no_grad():
            with model.trace(_CLEAN):
                kept = save([mlp.output[:, _POSITION] for mlp in envoys])
            with model.trace(_CORRUPTED):
                for mlp, value in zip(envoys, kept, strict=True):
                    mlp.output[:, _POSITION] = value
                logits = model.output.logits.save()
        return [logits[:, _POSITION]]

    return {"ours": ours, "hooks": hooks}


def attribution_patching(model: Any, module: Any) -> dict[str, Work]:
    """Estimate the effect of patching each MLP: the difference of the runs times the gradient."""

    def hooks() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        attributions: list[torch.Tensor] = []

        def attribute(output: torch.Tensor) -> None:
            value = kept.pop(0)
            output.register_hook(lambda gradient: attributions.append(((value - output) * gradient).sum(-1)))

        modules = [layer.mlp for layer in module.model.layers]
        embedding = [module.model.embed_tokens]
        with torch.no_grad(), hooked(modules, kept.append):
            module(_CLEAN)
        with hooked(embedding, lambda output: output.requires_grad_()), hooked(modules, attribute):
            logits = module(_CORRUPTED).logits
        _metric(logits).backward()
        return attributions

    def ours() -> list[torch.Tensor]:
        with torch.no_grad(), model.trace(_CLEAN):
            kept = save([layer.mlp.output for layer in model.model.layers])
        with model.trace(_CORRUPTED):
            model.model.embed_tokens.output.requires_grad_()
            outputs = [layer.mlp.output for layer in model.model.layers]
            metric = _metric(model.output.logits)
            attributions = save([])
            with metric.backward():
                for output, value in zip(reversed(outputs), reversed(kept), strict=True):
                    attributions.append(((value - output) * output.grad).sum(-1))
        return attributions

    return {"ours": ours, "hooks": hooks}


def _metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, _POSITION, 1000] - logits[:, _POSITION, 2000]).float().sum()
