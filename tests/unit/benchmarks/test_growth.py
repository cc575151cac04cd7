"""Growth is judged by the sizes whose cost can be told from noise."""

from __future__ import annotations

import pytest

from benchmarks.case import Sample, growth_power
from benchmarks.tables.scaling import growths


def samples(costs: dict[int, list[float]]) -> list[Sample]:
    return [
        {f"{side}, {size}": 1.0 + (own[repeat] if side == "with" else 0.0) for size, own in costs.items()
         for side in ("with", "without")}
        for repeat in range(5)
    ]  # fmt: skip


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_is_the_power_by_which_costs_grow(power: float) -> None:
    costs = {size: [0.01 * size**power] * 5 for size in (1, 2, 8)}
    assert growth_power([1, 2, 8], samples(costs)) == pytest.approx(power, abs=1e-6)


def test_a_cost_within_the_noise_does_not_tilt_the_slope() -> None:
    costs = {1: [0.0001, -0.1, -0.01, 0.1, 0.2], 2: [0.02] * 5, 4: [0.04] * 5}
    assert growth_power([1, 2, 4], samples(costs)) == pytest.approx(1.0, abs=1e-6)
    assert growth_power([1, 2], samples(costs)) is None


def test_every_curve_has_sizes_of_its_own_and_a_slope() -> None:
    for growth in growths():
        sizes = [point.size for point in growth.points]
        assert sizes == sorted(set(sizes))
        assert len(sizes) > 2
        assert growth.measures[-1].name == "slope"
