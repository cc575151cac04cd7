"""Logistic regression over several layers is that over their values side by side."""

from __future__ import annotations

import numpy as np
import pytest

from app.training.logistic import logistic


def test_each_layers_weights_lie_where_the_loss_of_all_together_is_least() -> None:
    random = np.random.default_rng(0)
    positive = [random.normal(size=(14, width)) * 3 + 0.5 for width in (6, 40, 9)]
    negative = [random.normal(size=(11, width)) * 3 - 5 for width in (6, 40, 9)]
    weights, bias = logistic(positive, negative)
    samples = np.concatenate((np.hstack(positive), np.hstack(negative)))
    labels = np.repeat([1.0, 0.0], [14, 11])
    whole = np.concatenate(weights)
    errors = 1 / (1 + np.exp(-(samples @ whole + bias))) - labels
    squared = np.square(samples.std(axis=0)) * samples.shape[1]
    gradient = samples.T @ errors + 0.01 * len(labels) * squared * whole
    assert abs(errors.sum()) < 1e-6
    assert np.abs(gradient).max() < 1e-5


def test_constant_dimensions_have_no_weight() -> None:
    random = np.random.default_rng(1)
    positive, negative = random.normal(size=(2, 9, 5))
    positive += 2
    positive[:, 2] = negative[:, 2] = 7.0
    (weights,), _ = logistic([positive], [negative])
    assert weights[2] == pytest.approx(0, abs=1e-6)
    assert np.isfinite(weights).all()
