"""Scores of two sides against the plainest way to compute them."""

from __future__ import annotations

import numpy as np

from app.training.scores import auroc, best_cut, roc, thinned


def sides(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return scores with ties, of random number and spread."""
    spread = float(random.choice([1e-6, 1.0, 1e6]))
    drawn = [random.normal(size=random.integers(1, 40)) * spread + random.normal() for _ in range(2)]
    digits = int(random.integers(0, 7))
    return tuple(np.round(one / spread, digits).astype(np.float32) * np.float32(spread) for one in drawn)  # type: ignore[return-value]


def test_the_area_counts_pairs() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        positive, negative = sides(random)
        pairs = [(a > b) + (a == b) / 2 for a in positive for b in negative]
        assert auroc(positive, negative) == float(np.mean(pairs)) or np.isclose(
            auroc(positive, negative), np.mean(pairs), atol=1e-12
        )


def test_the_curve_has_a_point_for_each_way_to_cut_the_samples() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        positive, negative = sides(random)
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
    assert first == (2.5, 1.0, 0.0)
    assert second == (1.0, 1.0, 1.0)


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
