"""What is kept of a sandboxed process's changes, should a step be run again."""

from __future__ import annotations

from nnsight_engine.vllm_backend.traces.sandboxed.changes import Changes


def test_not_more_is_kept_than_may_be_and_the_next_step_starts_anew() -> None:
    changes = Changes(100)
    changes.keep("a", [], memoryview(bytes(60)))
    assert list(changes.by_place) == ["a"]
    changes.keep("b", [], memoryview(bytes(60)))
    assert (changes.is_too_much, list(changes.by_place)) == (True, [])
    changes.clear()
    changes.keep("c", [], memoryview(bytes(60)))
    assert (changes.is_too_much, list(changes.by_place)) == (False, ["c"])
