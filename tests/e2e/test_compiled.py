"""Taps inside the compiled step: interventions work there, and neighbours do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Engine, Reply
from tests.e2e.neighbours import INTERVENTIONS, PROMPTS, asks, assert_neighbours_notice_nothing

pytestmark = pytest.mark.e2e

TAPPED = ["steer at one layer", "steer at all layers", "capture everywhere", "lens", "logits"]


@pytest.fixture(scope="module")
def engine(bundled: Path) -> Iterator[Engine]:
    """Serve with inductor, as ``--compile`` does."""
    engine = Engine(bundled, enforce_eager=False, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Reply]:
    """Run the batch with nobody intervening."""
    return [reply for (reply,) in engine.run(asks([]))]


@pytest.mark.parametrize("name", TAPPED)
def test_seven_neighbours_are_bit_identical(engine: Engine, plain: list[Reply], name: str) -> None:
    own = assert_neighbours_notice_nothing(engine, plain, name)
    assert own.collected is not None
    assert own.collected.tier == "tap"


def test_points_inside_a_block_run_that_step_uncompiled(engine: Engine) -> None:
    reply = engine.ask(PROMPTS[0], INTERVENTIONS["hooks"], max_tokens=4)
    assert reply.failure is None
    assert reply.collected is not None
    assert reply.collected.tier == "eager"
    assert reply.result("capture_1").positions == list(range(len(engine.token_ids(PROMPTS[0])) + 3))
