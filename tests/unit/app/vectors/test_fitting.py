"""A layer's row: what each method finds in values whose answer is known, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.training.split import NothingToLearnError, split
from app.vectors.fitting import Fitted, Method, fit

METHODS: list[Method] = ["mean_difference", "pca", "logistic"]
WIDTH = 24
AXIS = np.eye(WIDTH)[3]


def sides(distance: float, count: int = 40, seed: int = 0) -> tuple[Any, Any]:
    """Return noise, far from zero, whose sides lie apart along one axis."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=(2, count, WIDTH)) + 50
    return noise[0] + distance * AXIS, noise[1]


def fitted(towards: Any, away: Any, method: Method, seed: int = 0) -> Fitted:
    chosen = split(len(towards), len(away), holdout=0.25, seed=seed)
    return fit(towards, away, chosen, method)


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
    found = fitted(*sides(6.0), method)
    assert found.row @ AXIS / found.norm > (0.5 if method == "logistic" else 0.8)
    assert min(found.auroc, found.accuracy) > 0.9
    assert 2 < found.separation < 9
    if method != "logistic":
        assert found.norm == pytest.approx(6.0, rel=0.2)


@pytest.mark.parametrize("method", METHODS)
def test_sides_that_are_alike_score_like_guessing(method: Method) -> None:
    scores = [fitted(*sides(0.0, seed=seed), method, seed).auroc for seed in range(20)]
    assert 0.4 < np.mean(scores) < 0.6


def test_the_logistic_probe_is_where_its_loss_is_least() -> None:
    towards, away = sides(1.0)
    chosen = split(len(towards), len(away), holdout=0.25, seed=0)
    found = fit(towards, away, chosen, "logistic")
    samples = np.concatenate((towards[chosen.positive], away[chosen.negative]))
    labels = np.repeat([1.0, 0.0], [len(chosen.positive), len(chosen.negative)])
    scale = np.square(samples.std(axis=0)) * WIDTH
    weights = found.row.astype(np.float64)
    errors = 1 / (1 + np.exp(-(samples @ weights + found.bias))) - labels
    gradient = samples.T @ errors + 0.01 * len(labels) * scale * weights
    assert abs(errors.sum()) < 1e-3
    assert np.abs(gradient).max() < 1e-2


def test_large_numbers_in_one_place_hide_nothing() -> None:
    towards, away = sides(6.0)
    for side in (towards, away):
        side[:, 0] += 5000 * np.random.default_rng(1).normal(size=len(side))
    assert fitted(towards, away, "logistic").auroc > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_what_says_nothing_is_refused(method: Method) -> None:
    towards, away = sides(6.0, count=8)
    with pytest.raises(NothingToLearnError, match="do not differ"):
        fitted(np.repeat(towards[:1], 8, axis=0), np.repeat(towards[:1], 8, axis=0), method)
    with pytest.raises(NothingToLearnError, match="do not differ"):
        fitted(np.zeros((4, WIDTH)), np.zeros((4, WIDTH)), method)
    for number in (np.nan, np.inf):
        broken = towards.copy()
        broken[1, 1] = number
        with pytest.raises(NothingToLearnError, match="not all numbers"):
            fitted(broken, away, method)
    with np.errstate(over="ignore"), pytest.raises(NothingToLearnError):
        fitted(towards * 1e300, away * 1e300, method)
