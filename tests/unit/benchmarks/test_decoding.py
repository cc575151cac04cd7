"""The clock of decoding: tokens that arrived while it ran, with results that come at once or a step later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest

from benchmarks.decoding import DecodingBatch, first_token_s
from benchmarks.engine import BenchmarkError
from benchmarks.interventions import LayerSizes, nothing

_PROMPTS: Final = [[1, 2], [3, 4], [5, 6]]


class FakeEngine:
    """Gives each request a token a step, ``num_ahead`` steps late; the last one in every ``period``-th."""

    shape = LayerSizes(2, 4)

    def __init__(self, num_ahead: int, *, period: int = 1, is_traced: bool = False) -> None:
        self.num_ahead, self.num_steps = num_ahead, 0
        self._period, self._trace = period, object() if is_traced else None
        self._left: list[int] = []
        self.num_tokens = 0

    def submit(self, _prompt: list[int], max_tokens: int, _content: object) -> Any:
        self._left.append(max_tokens)
        return SimpleNamespace(trace=self._trace)

    def step(self) -> list[int]:
        self.num_steps += 1
        if self.num_steps <= self.num_ahead:
            return []
        ended = []
        for index, left in enumerate(self._left):
            is_last = index == len(self._left) - 1
            if left and not (is_last and self.num_steps % self._period):
                self._left[index] -= 1
                self.num_tokens += 1
                ended += [index] if left == 1 else []
        return ended

    def finish(self, _requests: object) -> None:
        assert all(self._left), "no request ends while turns run"

    def check(self, _request: object, _output: object) -> None:
        pass


def batch(engine: Any, num_turns: int = 3) -> DecodingBatch:
    made = DecodingBatch(engine, _PROMPTS, nothing, num_turns)
    for _ in range(num_turns):
        made.run_turn()
    return made


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_every_request_gets_a_token_in_each_timed_step(num_ahead: int) -> None:
    assert batch(FakeEngine(num_ahead)).finish() > 0


@pytest.mark.parametrize(("num_ahead", "is_traced"), [(0, False), (0, True), (1, False)])
def test_a_batch_that_was_divided_is_refused(num_ahead: int, is_traced: bool) -> None:
    with pytest.raises(BenchmarkError, match=r"did not run it as one batch"):
        batch(FakeEngine(num_ahead, period=2, is_traced=is_traced)).finish()


def test_traced_requests_of_an_asynchronous_engine_may_miss_steps_and_their_tokens_are_counted() -> None:
    whole, divided = FakeEngine(1), FakeEngine(1, period=2, is_traced=True)
    for engine in (whole, divided):
        assert batch(engine).finish() > 0
    assert 0 < divided.num_tokens < whole.num_tokens


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_the_first_token_is_waited_for(num_ahead: int) -> None:
    engine: Any = FakeEngine(num_ahead)
    assert first_token_s(engine, [1, 2], []) > 0
    assert engine.num_steps == 1 + num_ahead
