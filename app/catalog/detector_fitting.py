"""Fitting a detector to values of labelled prompts; deterministic for the same values and seed.

``mlp`` is a network with one hidden layer, over the values at one layer or several. There are usually fewer
samples than dimensions. Weights that begin in the span of the samples stay in it, so its training uses the
samples' coordinates in that span.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from api_schemas.detectors import RocPoint
from app.catalog.training import (
    LEAST,
    NothingToLearnError,
    Split,
    Standardised,
    auroc,
    best_cut,
    logistic,
    roc,
    separation,
    thinned,
)
from nnsight_engine.core.detector import Detector, DetectorPart, Form, Link, Numbers

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
    inner, outer, offset = _train_network(layers, labels, hidden, seed)
    parts = []
    for layer, (weights, bias), row in zip(layers, inner, outer, strict=True):
        unscaled = weights @ layer.basis / layer.scale  # for the model's own values
        parts.append(
            {
                "hidden_weights": unscaled,
                "hidden_bias": bias - unscaled @ layer.centre,
                "weights": row,
            }
        )
    return parts, offset


def _in_span(standardised: Standardised) -> _Layer:
    """Return the samples of one layer as coordinates in the space that they span."""
    scaled = standardised.scaled
    variances, directions = np.linalg.eigh(scaled @ scaled.T)
    used = variances > _LEAST_VARIANCE * variances.max()
    lengths = np.sqrt(variances[used])
    basis = (directions[:, used] / lengths).T @ scaled
    return _Layer(standardised.centre, standardised.scale, basis, directions[:, used] * lengths)


def _train_network(
    layers: Sequence[_Layer], labels: Floats, hidden: int, seed: int
) -> tuple[list[tuple[Floats, Floats]], list[Floats], float]:
    """Return each layer's hidden weights and biases, each layer's row of output weights, and the bias."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")
        return drawn.div_(shape[-1] ** 0.5).requires_grad_()

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device="cpu", requires_grad=True)

    samples = [torch.from_numpy(np.ascontiguousarray(layer.coordinates)) for layer in layers]
    target = torch.from_numpy(labels)
    inner = [normal(hidden, layer_samples.shape[1]) for layer_samples in samples]
    shifts = [zeros(hidden) for _ in samples]
    outer = [normal(hidden) for _ in samples]
    offset = zeros()
    optimiser = torch.optim.Adam([*inner, *shifts, *outer, offset], lr=_STEP_SIZE)
    with torch.enable_grad():
        for _ in range(_NUM_STEPS):
            logits = offset + sum(
                torch.relu(layer_samples @ weights.T + shift) @ row
                for layer_samples, weights, shift, row in zip(samples, inner, shifts, outer, strict=True)
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


Values = npt.NDArray[Any]

_MAX_CUTS: Final = 50
_PRIOR_SAMPLES: Final = 2
"""The weight of the variance of both sides together in that within them, in samples."""


@dataclasses.dataclass(frozen=True, slots=True)
class FittedDetector:
    """A detector, with its best threshold, and its scores on the held-out samples.

    ``separation`` is the distance of the sides before the link, in standard deviations within a side.
    """

    detector: Detector
    auroc: float
    separation: float
    cuts: list[RocPoint]


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    form: Form
    hidden: int
    seed: int


def fit(
    positive: Values, negative: Values, points: Sequence[str], chosen: Split, recipe: Recipe
) -> FittedDetector:
    """Fit a detector with a part at each point to two sides of ``[samples, points, width]``, and score it.

    Raises NothingToLearnError if the sides do not differ at a point, or the values are not finite.
    """
    if not (np.isfinite(positive).all() and np.isfinite(negative).all()):
        raise NothingToLearnError("the model's values there are not all numbers")
    trained = _by_point(positive[chosen.positive]), _by_point(negative[chosen.negative])
    for towards, away in zip(*trained, strict=True):
        _check_different(towards, away, recipe.form)
    detector = _fit_detector(*trained, points, recipe)
    numbers = [tensor for part in detector.parts for tensor in part.tensors.values()]
    if not (np.isfinite(detector.bias) and all(np.isfinite(tensor).all() for tensor in numbers)):
        raise NothingToLearnError(
            "the difference of the two sides there is too small or too large for float32"
        )
    return _with_scores(detector, (positive, negative), chosen)


def _by_point(values: Values) -> list[Values]:
    return [values[:, index] for index in range(values.shape[1])]


def _check_different(positive: Values, negative: Values, form: Form) -> None:
    """Raise NothingToLearnError if all samples are the same, or, but for an MLP, both sides' means."""
    towards, away = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    both = np.concatenate((towards, away))
    least = LEAST * float(np.sqrt(np.square(both).sum(axis=1).mean()))
    distance = np.linalg.norm(towards.mean(axis=0) - away.mean(axis=0))
    # A network may tell sides of one mean apart.
    if both.std(axis=0).max() <= least or (form is not Form.MLP and distance <= least):
        raise NothingToLearnError("the two sides do not differ there")


def _fit_detector(
    positive: list[Values], negative: list[Values], points: Sequence[str], recipe: Recipe
) -> Detector:
    """Return a detector with a part of the recipe's form for each point, as yet without a threshold."""
    link, bias = Link.SIGMOID, 0.0
    match recipe.form:
        case Form.LINEAR:
            weights, bias = logistic(positive, negative)
            layers = [{"weights": row} for row in weights]
        case Form.MLP:
            layers, bias = fit_mlp(positive, negative, hidden=recipe.hidden, seed=recipe.seed)
        case Form.DISTANCE:
            link = Link.IDENTITY
            layers = [_mean_and_scale(*sides) for sides in zip(positive, negative, strict=True)]
    parts = [
        DetectorPart(point, recipe.form, {name: _as_float32(tensor) for name, tensor in layer.items()})
        for point, layer in zip(points, layers, strict=True)
    ]
    return Detector(tuple(parts), bias, link)


def _mean_and_scale(positive: Values, negative: Values) -> dict[str, Floats]:
    """Return the mean of the positive side, and one over the standard deviation within the sides.

    Few samples say little about the deviation of one dimension, so that of both sides together counts too.
    A dimension that is constant counts nothing.
    """
    towards, away = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    both = np.concatenate((towards, away))
    within = len(towards) * towards.var(axis=0) + len(away) * away.var(axis=0)
    num_free = len(both) - 2  # degrees of freedom: each side's mean is an estimate
    variance = (within + _PRIOR_SAMPLES * both.var(axis=0)) / (num_free + _PRIOR_SAMPLES)
    deviation = np.sqrt(variance)
    varies = deviation > LEAST * deviation.max()
    scale = np.where(varies, 1 / np.where(varies, deviation, 1.0), 0.0)
    return {"mean": towards.mean(axis=0), "scale": scale}


def _as_float32(numbers: Floats) -> Numbers:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32)


def _with_scores(detector: Detector, sides: tuple[Values, Values], chosen: Split) -> FittedDetector:
    """Return the detector with the threshold that is best on the held-out samples, and its scores there."""

    def scores_of_sides(scorer: Detector) -> tuple[Numbers, Numbers]:
        positive, negative = (
            scorer.scores({part.point: side[:, index] for index, part in enumerate(scorer.parts)})
            for side in sides
        )
        return positive, negative

    with np.errstate(over="ignore", invalid="ignore"):
        totals, scores = (
            scores_of_sides(dataclasses.replace(detector, link=Link.IDENTITY)),
            scores_of_sides(detector),
        )
    if not all(np.isfinite(side_totals).all() for side_totals in totals):
        raise NothingToLearnError("the scores there are beyond float32")
    held_out = scores[0][chosen.held_positive], scores[1][chosen.held_negative]
    wide = totals[0].astype(np.float64), totals[1].astype(np.float64)
    cuts = roc(*held_out)
    best = best_cut(cuts)
    return FittedDetector(
        dataclasses.replace(detector, threshold=best.threshold),
        auroc(*held_out),
        separation((wide[0][chosen.held_positive], wide[1][chosen.held_negative]), wide),
        thinned(cuts, _MAX_CUTS, best),
    )
