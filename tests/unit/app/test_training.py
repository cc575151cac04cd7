"""Rows and detectors fitted to values whose answer is known, and the scores of their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from api_schemas.detectors import RocPoint
from app.catalog.detector_fitting import FittedDetector, Recipe, fit, fit_mlp
from app.catalog.training import NothingToLearnError, auroc, best_cut, roc, split, thinned
from app.catalog.vectors import Fitted, Method
from app.catalog.vectors import fit as fit_row
from nnsight_engine.core.detector import Detector, DetectorPart, Form

METHODS: list[Method] = ["mean_difference", "pca", "logistic"]
WIDTH = 24
AXIS = np.eye(WIDTH)[3]


def row_sides(distance: float, count: int = 40, seed: int = 0) -> tuple[Any, Any]:
    """Return noise, far from zero, whose sides lie apart along one axis."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=(2, count, WIDTH)) + 50
    return noise[0] + distance * AXIS, noise[1]


def fitted_row(towards: Any, away: Any, method: Method, seed: int = 0) -> Fitted:
    chosen = split(len(towards), len(away), holdout=0.25, seed=seed)
    return fit_row(towards, away, chosen, method)


def test_splits_keep_back_some_of_each_side_and_never_all() -> None:
    for num_positive, num_negative, holdout in ((2, 2, 0.5), (3, 9, 0.25), (100, 5, 0.01), (7, 7, 0.5)):
        chosen = split(num_positive, num_negative, holdout=holdout, seed=1)
        for trained, held, count in (
            (chosen.positive, chosen.held_positive, num_positive),
            (chosen.negative, chosen.held_negative, num_negative),
        ):
            assert sorted([*trained, *held]) == list(range(count))
            assert len(trained) >= 1
            assert len(held) >= 1
    paired = split(9, 9, holdout=0.25, seed=1)
    np.testing.assert_array_equal(paired.positive, paired.negative)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_finds_the_axis(method: Method) -> None:
    found = fitted_row(*row_sides(6.0), method)
    assert found.row @ AXIS / found.norm > (0.5 if method == "logistic" else 0.8)
    assert min(found.auroc, found.accuracy) > 0.9
    assert 2 < found.separation < 9
    if method != "logistic":
        assert found.norm == pytest.approx(6.0, rel=0.2)


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_sides_that_are_alike_score_like_guessing(method: Method) -> None:
    scores = [fitted_row(*row_sides(0.0, seed=seed), method, seed).auroc for seed in range(20)]
    assert 0.4 < np.mean(scores) < 0.6


def test_the_logistic_probe_is_where_its_loss_is_least() -> None:
    towards, away = row_sides(1.0)
    chosen = split(len(towards), len(away), holdout=0.25, seed=0)
    found = fit_row(towards, away, chosen, "logistic")
    samples = np.concatenate((towards[chosen.positive], away[chosen.negative]))
    labels = np.repeat([1.0, 0.0], [len(chosen.positive), len(chosen.negative)])
    scale = np.square(samples.std(axis=0)) * WIDTH
    weights = found.row.astype(np.float64)
    errors = 1 / (1 + np.exp(-(samples @ weights + found.bias))) - labels
    gradient = samples.T @ errors + 0.01 * len(labels) * scale * weights
    assert abs(errors.sum()) < 1e-3
    assert np.abs(gradient).max() < 1e-2


def test_large_numbers_in_one_place_hide_nothing() -> None:
    towards, away = row_sides(6.0)
    for side in (towards, away):
        side[:, 0] += 5000 * np.random.default_rng(1).normal(size=len(side))
    assert fitted_row(towards, away, "logistic").auroc > 0.9


def drawn_scores(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return scores with ties, of random number and spread."""
    spread = float(random.choice([1e-6, 1.0, 1e6]))
    drawn = [random.normal(size=random.integers(1, 40)) * spread + random.normal() for _ in range(2)]
    digits = int(random.integers(0, 7))
    return tuple(np.round(one / spread, digits).astype(np.float32) * np.float32(spread) for one in drawn)  # type: ignore[return-value]


def test_the_area_counts_pairs() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        positive, negative = drawn_scores(random)
        pairs = [(a > b) + (a == b) / 2 for a in positive for b in negative]
        assert auroc(positive, negative) == float(np.mean(pairs)) or np.isclose(
            auroc(positive, negative), np.mean(pairs), atol=1e-12
        )


def test_the_curve_has_a_point_for_each_way_to_cut_the_samples() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        positive, negative = drawn_scores(random)
        cuts = roc(positive, negative)
        levels = np.unique(np.concatenate((positive, negative)))[::-1]
        assert [(cut.tpr, cut.fpr) for cut in cuts] == [
            ((positive >= level).mean(), (negative >= level).mean()) for level in levels
        ]
        for cut in cuts:  # each is what its own threshold does, in float32 too
            assert (positive >= np.float32(cut.threshold)).mean() == cut.tpr
            assert (negative >= np.float32(cut.threshold)).mean() == cut.fpr
        # The area under the steps is the probability that pairs are counted by.
        xs, ys = [0.0, *(cut.fpr for cut in cuts)], [0.0, *(cut.tpr for cut in cuts)]
        assert np.isclose(np.trapezoid(ys, xs), auroc(positive, negative))
        gains = [(positive >= level).mean() - (negative >= level).mean() for level in levels]
        best = best_cut(cuts)
        assert best.tpr - best.fpr == max(gains)
        assert best == cuts[int(np.argmax(gains))]


def test_a_threshold_lies_half_way_to_the_next_score() -> None:
    first, second = roc(np.array([4.0], np.float32), np.array([1.0], np.float32))
    assert first == RocPoint(threshold=2.5, tpr=1.0, fpr=0.0)
    assert second == RocPoint(threshold=1.0, tpr=1.0, fpr=1.0)


def test_a_long_curve_is_thinned_and_keeps_its_ends_and_the_best() -> None:
    random = np.random.default_rng(2)
    for count in (1, 49, 50, 51, 60, 99, 1000):
        scores = random.permutation(count).astype(np.float32)
        cuts = roc(scores[: count // 2 + 1], scores[count // 2 :])
        for keep in (cuts[0], cuts[-1], cuts[len(cuts) // 3]):
            thin = thinned(cuts, 50, keep)
            assert len(thin) == min(len(cuts), len(thin)) <= 50
            assert len(thin) >= min(len(cuts), 48)
            assert (thin[0], thin[-1]) == (cuts[0], cuts[-1])
            assert keep in thin
            assert [cuts.index(one) for one in thin] == sorted(cuts.index(one) for one in thin)


POINTS = ["layers.1.output", "layers.5.output"]
FORMS = list(Form)


def sides(distance: float, count: int = 40, layers: int = 2, seed: int = 0) -> tuple[Any, Any]:
    """Return noise far from zero, of unlike scales, whose sides lie apart along one axis of each layer."""
    random = np.random.default_rng(seed)
    scales = random.uniform(0.01, 100, size=(layers, WIDTH))
    noise = random.normal(size=(2, count, layers, WIDTH)) * scales + 50 * scales
    noise[0, :, :, 3] += distance * scales[:, 3]
    return noise[0].astype(np.float32), noise[1].astype(np.float32)


def fitted(towards: Any, away: Any, form: Form, points: list[str] = POINTS, seed: int = 0) -> FittedDetector:
    chosen = split(len(towards), len(away), holdout=0.25, seed=seed)
    return fit(towards, away, points, chosen, Recipe(form, 16, seed))


def scores_of(detector: Detector, values: Any) -> Any:
    return detector.scores({part.point: values[:, index] for index, part in enumerate(detector.parts)})


@pytest.mark.parametrize("form", FORMS)
def test_the_scores_are_those_of_held_out_examples(form: Form) -> None:
    towards, away = sides(1.0, count=30)
    found = fitted(towards, away, form)
    chosen = split(30, 30, holdout=0.25, seed=0)
    held = (
        scores_of(found.detector, towards)[chosen.held_positive],
        scores_of(found.detector, away)[chosen.held_negative],
    )
    assert found.auroc == auroc(*held)
    for cut in found.cuts:
        assert (cut.tpr, cut.fpr) == ((held[0] >= cut.threshold).mean(), (held[1] >= cut.threshold).mean())


@pytest.mark.parametrize("form", FORMS)
def test_sides_that_are_alike_score_like_guessing(form: Form) -> None:
    found = [fitted(*sides(0.0, count=16, seed=seed), form, seed=seed).auroc for seed in range(12)]
    assert 0.35 < np.mean(found) < 0.65


def test_a_network_tells_apart_what_no_line_does() -> None:
    random = np.random.default_rng(3)
    corner = random.integers(0, 2, size=(2, 200)) * 2 - 1
    values = random.normal(size=(200, 1, WIDTH)).astype(np.float32) * 0.3
    values[:, 0, :2] += 4 * corner.T
    same = corner[0] == corner[1]
    towards, away = values[same], values[~same]
    network, line = [fitted(towards, away, form, POINTS[:1]).auroc for form in (Form.MLP, Form.LINEAR)]
    assert network > 0.97
    assert line < 0.8


def test_a_networks_tensors_take_the_values_as_they_are() -> None:
    """Standardisation and the samples' coordinates are folded into the weights: against torch's layers."""
    towards, away = sides(6.0, count=12)
    layers, bias = fit_mlp(
        [towards[:, index] for index in range(2)], [away[:, index] for index in range(2)], hidden=8, seed=1
    )
    total = torch.full((len(towards),), bias, dtype=torch.float64)
    for index, layer in enumerate(layers):
        inner, outer = torch.nn.Linear(WIDTH, 8).double(), torch.nn.Linear(8, 1, bias=False).double()
        with torch.no_grad():
            inner.weight.copy_(torch.from_numpy(layer["hidden_weights"]))
            inner.bias.copy_(torch.from_numpy(layer["hidden_bias"]))
            outer.weight.copy_(torch.from_numpy(layer["weights"])[None])
            values = torch.from_numpy(towards[:, index]).double()
            total += outer(torch.relu(inner(values)))[:, 0]
    parts = [
        DetectorPart(point, Form.MLP, {name: tensor.astype(np.float32) for name, tensor in layer.items()})
        for point, layer in zip(POINTS, layers, strict=True)
    ]
    np.testing.assert_allclose(scores_of(Detector(tuple(parts), bias), towards), total, rtol=1e-3, atol=1e-3)
    assert (total > 0).double().mean() > 0.9  # logits, as trained


def test_a_networks_weights_are_where_torch_brings_them_on_the_standardised_values() -> None:
    """The span's coordinates are a way to compute: gradients of whole weights vanish too."""
    towards, away = sides(2.0, count=10, layers=1)
    (layer,), bias = fit_mlp([towards[:, 0]], [away[:, 0]], hidden=4, seed=0)
    samples = np.concatenate((towards[:, 0], away[:, 0])).astype(np.float64)
    centre, scale = samples.mean(axis=0), samples.std(axis=0) * np.sqrt(WIDTH)
    inner = torch.tensor(layer["hidden_weights"] * scale, requires_grad=True)
    shift = torch.tensor(layer["hidden_bias"] + layer["hidden_weights"] @ centre, requires_grad=True)
    outer = torch.tensor(layer["weights"], requires_grad=True)
    values, target = torch.tensor((samples - centre) / scale), torch.tensor([1.0] * 10 + [0.0] * 10).double()
    logits = torch.relu(values @ inner.T + shift) @ outer + bias
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
    (loss + 0.001 * (inner.square().sum() + outer.square().sum())).backward()
    assert loss.item() < 0.2
    for gradient in (inner.grad, shift.grad, outer.grad):
        assert gradient is not None
        assert gradient.abs().max() < 5e-3  # of about 0.1 at the start


def test_a_distance_is_in_deviations_from_the_positive_mean() -> None:
    towards, away = sides(8.0, count=400, layers=1)
    found = fitted(towards, away, Form.DISTANCE, POINTS[:1])
    (part,) = found.detector.parts
    trained = split(400, 400, holdout=0.25, seed=0)
    np.testing.assert_allclose(part.tensors["mean"], towards[trained.positive, 0].mean(axis=0), rtol=1e-5)
    within = (towards[trained.positive, 0].var(axis=0) + away[trained.negative, 0].var(axis=0)) / 2
    np.testing.assert_allclose(part.tensors["scale"], 1 / np.sqrt(within), rtol=0.05)
    # In high dimensions a sample lies the root of their number from the mean.
    assert np.median(scores_of(found.detector, towards)) == pytest.approx(-np.sqrt(WIDTH), rel=0.1)


@pytest.mark.parametrize("form", FORMS)
def test_few_samples_and_constant_dimensions_are_enough_to_compute_with(form: Form) -> None:
    for count in (2, 3):
        towards, away = sides(6.0, count=count)
        towards[:, :, 5] = away[:, :, 5] = 7.0
        found = fitted(towards, away, form)
        assert np.isfinite([found.auroc, found.separation, found.detector.threshold or 0.0]).all()
        moved = towards.copy()
        moved[:, :, 5] = 7.001  # was constant, so it has no weight
        np.testing.assert_allclose(
            scores_of(found.detector, moved), scores_of(found.detector, towards), rtol=1e-3
        )


@pytest.mark.parametrize("form", FORMS)
def test_what_says_nothing_is_refused(form: Form) -> None:
    towards, away = sides(6.0, count=8)
    same = np.repeat(towards[:1], 8, axis=0)
    with pytest.raises(NothingToLearnError, match="do not differ"):
        fitted(same, same, form)
    half = towards.copy(), away.copy()
    for side in half:
        side[:, 1] = 1.0  # of one of the layers
    with pytest.raises(NothingToLearnError, match="do not differ"):
        fitted(*half, form)
    for number in (np.nan, np.inf):
        broken = away.copy()
        broken[1, 1, 1] = number
        with pytest.raises(NothingToLearnError, match="not all numbers"):
            fitted(towards, broken, form)
