"""A network with one hidden layer that tells two sides apart, over the values at one layer or several.

There are usually fewer samples than dimensions. Weights that begin in the span of the samples stay in it, so
training uses the samples' coordinates in that span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from app.training.logistic import Standardised

Floats = npt.NDArray[np.float64]

_NUM_STEPS: Final = 400
_STEP_SIZE: Final = 0.02
_PENALTY: Final = 0.002
"""L2 penalty on all weights but the biases."""
_LEAST_VARIANCE: Final = 1e-12
"""The smallest variance of a coordinate that is used, relative to the largest."""


class _Layer(NamedTuple):
    centre: Floats
    scale: Floats
    basis: Floats
    coordinates: Floats


def fit_mlp(
    positive: Sequence[npt.NDArray[Any]], negative: Sequence[npt.NDArray[Any]], *, hidden: int, seed: int
) -> tuple[list[dict[str, Floats]], float]:
    """Return the tensors of each layer's part, see ``nnsight_engine.core.detector.TENSORS``, and the bias.

    Minimises the logistic loss with Adam, all samples at each step; values are ``[samples, width]`` by layer.
    """
    num_dimensions = sum(layer.shape[1] for layer in positive)
    layers = [
        _in_span(Standardised(np.concatenate(sides), num_dimensions))
        for sides in zip(positive, negative, strict=True)
    ]
    labels = np.concatenate((np.ones(len(positive[0])), np.zeros(len(negative[0]))))
    inner, outer, offset = _trained(layers, labels, hidden, seed)
    parts = []
    for layer, (weights, bias), row in zip(layers, inner, outer, strict=True):
        written = weights @ layer.basis / layer.scale
        parts.append(
            {
                "hidden_weights": written,
                "hidden_bias": bias - written @ layer.centre,
                "weights": row,
            }
        )
    return parts, offset


def _in_span(standardised: Standardised) -> _Layer:
    scaled = standardised.scaled
    variances, directions = np.linalg.eigh(scaled @ scaled.T)
    used = variances > _LEAST_VARIANCE * variances.max()
    lengths = np.sqrt(variances[used])
    basis = (directions[:, used] / lengths).T @ scaled
    return _Layer(standardised.centre, standardised.scale, basis, directions[:, used] * lengths)


def _trained(
    layers: Sequence[_Layer], labels: Floats, hidden: int, seed: int
) -> tuple[list[tuple[Floats, Floats]], list[Floats], float]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")
        return drawn.div_(shape[-1] ** 0.5).requires_grad_()

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device="cpu", requires_grad=True)

    samples = [torch.from_numpy(np.ascontiguousarray(layer.coordinates)) for layer in layers]
    target = torch.from_numpy(labels)
    inner = [normal(hidden, each.shape[1]) for each in samples]
    shifts = [zeros(hidden) for _ in samples]
    outer = [normal(hidden) for _ in samples]
    offset = zeros()
    optimiser = torch.optim.Adam([*inner, *shifts, *outer, offset], lr=_STEP_SIZE)
    with torch.enable_grad():
        for _ in range(_NUM_STEPS):
            logits = offset + sum(
                torch.relu(each @ weights.T + shift) @ row
                for each, weights, shift, row in zip(samples, inner, shifts, outer, strict=True)
            )
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
            penalty = sum(weights.square().sum() for weights in (*inner, *outer))
            optimiser.zero_grad()
            (loss + _PENALTY / 2 * penalty).backward()
            optimiser.step()
    hidden_layers = [
        (weights.detach().numpy(), shift.detach().numpy())
        for weights, shift in zip(inner, shifts, strict=True)
    ]
    return hidden_layers, [row.detach().numpy() for row in outer], float(offset.detach())


__all__ = ["fit_mlp"]
