"""Growth is judged by the sizes whose cost can be told from noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.growth import Cost, Growth, cost_of, growths, slope
from benchmarks.scaling import Curve, Report
from tests.unit.benchmarks.test_serving_table import HERE


def costs(power: float, sizes: tuple[int, ...] = (1, 2, 8)) -> list[Cost]:
    return [cost_of(size, [1.0] * 5, [1.0 + 0.01 * size**power] * 5) for size in sizes]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_is_the_power_by_which_costs_grow(power: float) -> None:
    assert slope(costs(power)) == pytest.approx(power, abs=1e-6)


def test_a_cost_within_the_noise_does_not_tilt_the_slope() -> None:
    noise = cost_of(1, [1.0, 1.0, 1.0, 1.0], [1.0001, 0.9, 0.99, 1.1])
    assert not noise.is_clear
    assert slope([noise, *costs(1.0, (2, 4))]) == pytest.approx(1.0, abs=1e-6)
    assert slope([noise, *costs(1.0, (2,))]) is None


def test_a_cost_is_the_median_of_what_each_repetition_took_more() -> None:
    cost = cost_of(8, [1.0, 2.0, 4.0], [1.5, 3.0, 4.4])
    assert (cost.idle_s, cost.cost_s, cost.ratio) == pytest.approx((2.0, 0.5, 1.5))


def test_every_curve_has_sizes_of_its_own() -> None:
    for growth in growths():
        sizes = [point.size for point in growth.points]
        assert sizes == sorted(set(sizes))
        assert len(sizes) > 2


def test_a_table_says_what_bounds_the_curves_that_are_not_linear(tmp_path: Path) -> None:
    curves = [
        Curve(Growth("a capture", "saved bytes", (), "Memory does."), costs(2.0)),
        Curve(Growth("a trace", "saved bytes", (), "Nothing does."), costs(1.0)),
    ]
    written = Report(HERE, "eager", 5, [], curves).write(tmp_path).read_text(encoding="utf-8")
    assert "- a capture, by saved bytes: Memory does." in written
    assert "Nothing does." not in written
