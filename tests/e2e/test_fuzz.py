"""Random requests answer as transformers does: a share of ``make fuzz``, with another seed each day."""

from __future__ import annotations

import datetime
import os
from typing import Final

import pytest

from tests.e2e.fuzz.rounds import BUNDLED, DTYPES, Round, play_round

pytestmark = pytest.mark.e2e

_DAY: Final = int(os.environ.get("FUZZ_DAY") or datetime.datetime.now(datetime.UTC).date().toordinal())
"""Decides what is played; the variable repeats a day's."""
_SEED: Final = 1000 * _DAY
_SECONDS: Final = 40.0
_FAMILIES: Final = ("qwen3", "gpt2", "opt")
_SHAPES: Final = ("roomy", "tight")
"""What takes turns here; the command has more, and compiled engines, which take long to start."""
_OTHER: Final = _FAMILIES[_DAY % len(_FAMILIES)]

ROUNDS: Final = [
    *(("llama", dtype, "tight") for dtype in DTYPES),
    *((_OTHER, dtype, _SHAPES[(_DAY + number) % len(_SHAPES)]) for number, dtype in enumerate(DTYPES)),
    (BUNDLED, "float32", "roomy"),
]


@pytest.mark.parametrize(("family", "dtype", "shape"), ROUNDS)
def test_random_requests_answer_as_transformers_does(family: str, dtype: str, shape: str) -> None:
    report = play_round(Round(family, dtype, shape, _SEED, _SECONDS))
    # A failure prints rounds as JSON: python -m tests.e2e.fuzz --replay FILE plays one again.
    assert not report.failures, f"FUZZ_DAY={_DAY}: {report}"
    assert report.counts["operations judged"] > 0
