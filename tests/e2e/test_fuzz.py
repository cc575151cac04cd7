"""Random requests answer as transformers does: a share of ``make fuzz``."""

from __future__ import annotations

from typing import Final

import pytest

from tests.e2e.fuzz.rounds import BUNDLED, DTYPES, Round, play_round

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_SEED: Final = 1000
_SECONDS: Final = 40.0
_SECONDS_COMPILED: Final = 15.0
"""Less, since compiling takes that long before."""
ROUNDS: Final = (
    *(("llama", dtype, "tight") for dtype in DTYPES),
    ("qwen3", "float32", "compiled"),
    ("gemma2", "bfloat16", "roomy"),
    (BUNDLED, "float32", "roomy"),
)
"""Family, dtype and shape. Each takes seconds and the start of an engine; `make fuzz` plays them all."""


@pytest.mark.parametrize(("family", "dtype", "shape"), ROUNDS)
def test_random_requests_answer_as_transformers_does(family: str, dtype: str, shape: str) -> None:
    seconds = _SECONDS_COMPILED if shape == "compiled" else _SECONDS
    report = play_round(Round(family, dtype, shape, _SEED, seconds))
    # A failure prints rounds as JSON: python -m tests.e2e.fuzz --replay FILE plays one again.
    assert not report.failures, str(report)
    assert report.counts["operations judged"] > 0
