"""Random requests answer as transformers does: a share of ``make fuzz``, with another seed each day."""

from __future__ import annotations

from typing import Final

import pytest

from tests.e2e.fuzz.rounds import BUNDLED, DAY, DTYPES, FAMILIES, SHAPES, Round, play_round

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_SEED: Final = 1000 * DAY
_SECONDS: Final = 40.0
_SECONDS_COMPILED: Final = 15.0
"""Less, since compiling takes that long before."""
_OTHERS: Final = tuple(family for family in FAMILIES if family not in {"llama", BUNDLED})
_UNCOMPILED: Final = tuple(shape for shape in SHAPES if shape != "compiled")


def rounds_of(day: int) -> list[tuple[str, str, str]]:
    """Return family, dtype and shape of a day's rounds.

    Each takes seconds and the start of an engine, so there are five, and days share what there is. The
    bundled model takes minutes to compile, so only the command plays that.
    """
    other = _OTHERS[day % len(_OTHERS)]
    return [
        *(("llama", dtype, "tight") for dtype in DTYPES),
        *((other, dtype, SHAPES[(day + number) % len(SHAPES)]) for number, dtype in enumerate(DTYPES)),
        (BUNDLED, DTYPES[day % len(DTYPES)], _UNCOMPILED[day // len(DTYPES) % len(_UNCOMPILED)]),
    ]


def test_days_play_everything_within_a_month() -> None:
    played = {played for day in range(DAY, DAY + 30) for played in rounds_of(day)}
    wanted = {(family, dtype, shape) for family in _OTHERS for dtype in DTYPES for shape in SHAPES}
    assert played >= wanted | {(BUNDLED, dtype, shape) for dtype in DTYPES for shape in _UNCOMPILED}


@pytest.mark.parametrize(("family", "dtype", "shape"), rounds_of(DAY))
def test_random_requests_answer_as_transformers_does(family: str, dtype: str, shape: str) -> None:
    seconds = _SECONDS_COMPILED if shape == "compiled" else _SECONDS
    report = play_round(Round(family, dtype, shape, _SEED, seconds))
    # A failure prints rounds as JSON: python -m tests.e2e.fuzz --replay FILE plays one again.
    assert not report.failures, f"FUZZ_DAY={DAY}: {report}"
    assert report.counts["operations judged"] > 0
