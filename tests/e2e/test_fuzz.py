"""Random requests answer as transformers does: a share of ``make fuzz``, with another seed each day."""

from __future__ import annotations

import datetime
from typing import Final

import pytest

from tests.e2e.fuzz.rounds import BUNDLED, DTYPES, FAMILIES, SHAPES, Round, play_round

pytestmark = pytest.mark.e2e

_DAY: Final = datetime.datetime.now(datetime.UTC).date().toordinal()
_SEED: Final = 1000 * _DAY
_SECONDS: Final = 40.0
_OTHER: Final = FAMILIES[_DAY % len(FAMILIES)]

ROUNDS: Final = [
    *(("llama", dtype, "tight") for dtype in DTYPES),
    # The families and the shapes take turns.
    *((_OTHER, dtype, SHAPES[(_DAY + number) % len(SHAPES)]) for number, dtype in enumerate(DTYPES)),
    (BUNDLED, "float32", "roomy"),
]


@pytest.mark.parametrize(("family", "dtype", "shape"), ROUNDS)
def test_random_requests_answer_as_transformers_does(family: str, dtype: str, shape: str) -> None:
    report = play_round(Round(family, dtype, shape, _SEED, _SECONDS))
    # A failure prints rounds as JSON: python -m tests.e2e.fuzz --replay FILE plays one again.
    assert not report.failures, f"seed {_SEED}: {report}"
    assert report.counts["operations judged"] > 0
