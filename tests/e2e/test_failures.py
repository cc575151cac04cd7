"""What fails in the worker costs its own request only, and nothing is held afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.vllm_backend.compat import EngineLimits
from tests.e2e.harness import Ask, Engine, random_vector
from tests.narrow_model import WIDTH

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(narrow: Path) -> Iterator[Engine]:
    """Serve with room for little."""
    limits = EngineLimits(max_capture_bytes_per_request=44_000, max_capture_bytes_engine=55_000)
    with Engine(narrow, limits=limits, dtype="float32") as engine:
        yield engine


def test_a_capture_over_the_limit_fails_alone_and_says_how_much(engine: Engine) -> None:
    plain = engine.ask("I think dogs are", max_tokens=20)
    capture = {"op": "capture", "at": "layers.*.output", "name": "c", "where": {"phase": "generated"}}
    replies = engine.run(
        [Ask("I think dogs are", max_tokens=20), Ask("Hello there", [capture], max_tokens=20)]
    )
    assert replies[0][0].token_ids == plain.token_ids
    failure = replies[1][0].failure
    assert failure.code == "capture_too_large"
    assert "44000" in failure.message
    assert set(engine.held().values()) == {0}


def test_the_engines_limit_counts_all_requests(engine: Engine) -> None:
    capture = {"op": "capture", "at": "layers.0:10.output", "name": "c", "where": {"phase": "generated"}}
    # Only one fits. Many, because rows of drafts are counted late with asynchronous scheduling.
    batch = [Ask("Hello there", [capture], max_tokens=8) for _ in range(8)]
    codes = [reply.failure.code for (reply,) in engine.run(batch) if reply.failure]
    assert codes
    assert set(codes) == {"engine_capture_full"}
    assert engine.ask("Hello there", [capture], max_tokens=8).failure is None
    assert set(engine.held().values()) == {0}


def test_a_request_that_shares_blocks_with_a_failing_one_is_still_steered(engine: Engine) -> None:
    prompt = "The history of the city begins with a small settlement by the river. " * 4
    steer: dict[str, Any] = {"op": "steer", "at": "layers.5.output", "vector": random_vector(0), "scale": 4}
    capture: dict[str, Any] = {"op": "capture", "at": "layers.0.output", "where": {"phase": "prompt"}}
    expected = engine.ask(prompt, [steer], max_tokens=8).token_ids
    assert expected != engine.ask(prompt, max_tokens=8).token_ids
    assert engine.llm.reset_prefix_cache()
    holding = engine.submit(Ask(prompt, [capture], max_tokens=40))
    engine.core.step()
    batch = [
        engine.submit(Ask(prompt, operations, max_tokens=8)) for operations in ([steer, capture], [steer])
    ]
    (failed,), (sharing,), (held,) = engine.finish([*batch, holding])
    assert failed.failure is not None
    assert failed.failure.code == "engine_capture_full"
    assert held.failure is None
    assert sharing.failure is None
    assert sharing.token_ids == expected
    assert engine.ask(prompt, [steer], max_tokens=8).token_ids == expected


def test_a_plan_that_raises_in_the_worker_fails_alone(engine: Engine) -> None:
    """Past admission, a plan with a tensor of the wrong width must not reach its neighbours."""
    good = Ask("I think dogs are", max_tokens=6)
    ((expected,),) = engine.run([good])
    steer = {"op": "steer", "at": "layers.5.output", "vector": random_vector(0)}
    entries = [engine.submit(good), engine.submit_broken(Ask("Hello", [steer], max_tokens=6))]
    (reply,), (broken,) = engine.finish(entries)
    assert reply.token_ids == expected.token_ids
    assert broken.failure.code == "wrong_width"
    assert set(engine.held().values()) == {0}


def test_a_failure_that_comes_after_its_request_has_left_spoils_no_block(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may leave while the step runs in which a write of its request fails."""
    prompt = "The history of the city begins with a small settlement by the river. " * 20
    steer = {"op": "steer", "at": "layers.5.output", "vector": random_vector(0), "scale": 4}
    expected = engine.ask(prompt, [steer], max_tokens=8).token_ids
    assert engine.llm.reset_prefix_cache()
    entry = engine.submit_broken(Ask(prompt, [steer], max_tokens=8))
    scheduler = engine.core.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    has_left: list[bool] = []

    def update_after_leaving(*args: Any) -> Any:
        engine.core.abort_request([entry.request_id])
        has_left.append(True)
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "update_from_output", update_after_leaving)
        while not has_left:
            engine.core.step()
    engine.router.close(entry.request_id)
    reply = engine.ask(prompt, [steer], max_tokens=8)
    if reply.failure is not None:
        # With asynchronous scheduling it may have found the blocks before the failure was known.
        assert "send it again" in reply.failure.message
        reply = engine.ask(prompt, [steer], max_tokens=8)
    assert reply.token_ids == expected
    assert not reply.num_cached_tokens
    assert set(engine.held().values()) == {0}


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_request_that_comes_after_a_failed_one_is_steered(engine: Engine, num_steps: int) -> None:
    """One that comes before the failure is known may hold blocks that lack the write, and fails too."""
    prompt = "The history of the city begins with a small settlement by the river. " * 20
    ask = Ask(prompt, [{"op": "steer", "at": "layers.5.output", "vector": random_vector(0), "scale": 4}])
    ((expected,),) = engine.run([ask])
    assert engine.llm.reset_prefix_cache()
    entries = [engine.submit_broken(ask)]
    done: dict[str, Any] = {}
    for _ in range(num_steps):
        done |= engine.step()
    is_known = bool(done)
    (broken,), (reply,) = engine.finish([*entries, engine.submit(ask)], done)
    assert broken.failure.code == "wrong_width"
    if reply.failure is not None:
        assert not is_known
        assert "send it again" in reply.failure.message
        ((reply,),) = engine.run([ask])
    assert reply.token_ids == expected.token_ids
    assert set(engine.held().values()) == {0}


def test_a_vector_of_many_requests_is_held_once(engine: Engine) -> None:
    steer = {"op": "steer", "at": "layers.5.output", "vector": random_vector(0)}
    entries = [engine.submit(Ask("Hello there", [steer], max_tokens=20)) for _ in range(4)]
    for _ in range(3):
        engine.core.step()
    for counts in engine.llm.collective_rpc("count_interventions"):
        assert (counts["requests"], counts["vectors"]) == (4, 1)
    contents = engine.core.engine_core.engine_core.scheduler.contents
    assert len(contents) == 1
    engine.core.abort_request([entry.request_id for entry in entries])
    for entry in entries:
        engine.router.close(entry.request_id)
    assert set(engine.held().values()) == {0}
    assert len(contents) == 0


@pytest.mark.parametrize("size", [1e38, pytest.param(-1e38, marks=pytest.mark.heavy)])
def test_values_that_are_not_finite_stay_with_their_request(engine: Engine, size: float) -> None:
    """Blocks of the KV cache that hold NaN or infinity are used again, their unused ends by others."""
    prompt, point = "I think dogs are", "layers.20.output"
    capture = {"op": "capture", "at": point, "name": "c", "where": {"phase": "prompt"}}
    burst = {"op": "steer", "at": "layers.0:9.output", "vector": [size] * WIDTH}
    beside = [Ask(f"{number} dogs are", max_tokens=30) for number in range(4)]
    expected = engine.ask(prompt, [capture], max_tokens=20)
    others = engine.run(beside)
    for _ in range(3):
        ((burnt,), *again) = engine.run([Ask("Hello there, " * 20, [burst], max_tokens=30), *beside])
        assert burnt.failure is None
        assert [reply.token_ids for (reply,) in again] == [reply.token_ids for (reply,) in others]
        reply = engine.ask(prompt, [capture], max_tokens=20)
        assert reply.token_ids == expected.token_ids
        torch.testing.assert_close(reply.tensor("c", point), expected.tensor("c", point))
