"""Captured bytes are refused before they exist, and freed with their request."""

from __future__ import annotations

import pytest

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.ledger import ByteLedger


def test_a_request_may_not_pass_its_own_limit() -> None:
    ledger = ByteLedger(max_request_bytes=100, max_engine_bytes=1000)
    ledger.reserve("a", 60)
    with pytest.raises(InterventionError, match="100 bytes, this one asked for 120") as caught:
        ledger.reserve("a", 60)
    assert caught.value.code == "capture_too_large"
    # What was refused is not counted.
    ledger.reserve("a", 40)


def test_all_requests_share_the_engines_limit_until_one_ends() -> None:
    ledger = ByteLedger(max_request_bytes=100, max_engine_bytes=150)
    ledger.reserve("a", 100)
    with pytest.raises(InterventionError, match="150 captured bytes, 100 are held") as caught:
        ledger.reserve("b", 60)
    assert caught.value.code == "engine_capture_full"
    ledger.release("a")
    ledger.reserve("b", 60)
    assert ledger.total_bytes == 60
    ledger.release("b")
    ledger.release("never seen")
    assert ledger.total_bytes == 0
