"""Requests that decode together on one engine, and the time that their steps take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, TypeVar

import numpy as np

from benchmarks.engine import BenchmarkError, StepwiseEngine
from benchmarks.interventions import Content, ContentOf

T = TypeVar("T")

TURN_STEPS: Final = 8
"""Decode steps that one engine runs before it is the other's turn."""

_WARMUP_STEPS: Final = 4
"""Decode steps before the clock starts, prefill not counted."""

LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens in the bundled model."""


class RandomPrompts:
    """A stream of random prompts, none twice, so that no side finds a prefix in its cache."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)

    def batch(self, num_requests: int, num_tokens: int) -> list[list[int]]:
        """Return the next prompts as ids, all of one length."""
        shape = (num_requests, num_tokens)
        ids: list[list[int]] = self._random.integers(LOWEST_TOKEN, self._vocab_size, shape).tolist()
        return ids


class DecodingBatch:
    """Requests that start together on one engine; nothing else runs there meanwhile.

    They are submitted, prefilled in one step, and run for some steps that are not timed.
    """

    def __init__(
        self, engine: StepwiseEngine, prompts: list[list[int]], content_of: ContentOf, num_turns: int
    ) -> None:
        self._engine = engine
        self._num_timed, self._seconds = num_turns * TURN_STEPS, 0.0
        # Prefill gives one token; one more than is timed, so that ending is not.
        max_tokens = 1 + _WARMUP_STEPS + self._num_timed + 1
        self._requests = [
            engine.submit(prompt, max_tokens, content_of(index, engine.shape))
            for index, prompt in enumerate(prompts)
        ]
        for _ in range(1 + _WARMUP_STEPS):
            engine.step()

    def run_turn(self) -> None:
        """Run and time one turn."""
        start = time.perf_counter()
        for _ in range(TURN_STEPS):
            self._engine.step()
        self._seconds += time.perf_counter() - start

    def finish(self) -> float:
        """End the requests, check them, and return the seconds of a step."""
        num_left = self._engine.finish(self._requests)
        # Had one step served fewer requests than all, the batch would need more steps to end.
        if num_left != 1:
            raise BenchmarkError(
                f"a batch of {len(self._requests)} must end one step after the last timed one, it took "
                f"{num_left}; the scheduler did not run it as one batch"
            )
        return self._seconds / self._num_timed


def mirrored(first: T, second: T, num_turns: int) -> Iterator[T]:
    """Yield each side ``num_turns`` times: first, second, second, first, …."""
    for turn in range(num_turns):
        yield from (first, second) if turn % 2 == 0 else (second, first)


def first_token_s(engine: StepwiseEngine, prompt: list[int], content: Content) -> float:
    """Return the seconds from submitting a request to its first token."""
    start = time.perf_counter()
    request = engine.submit(prompt, 1, content)
    outputs = engine.step()
    seconds = time.perf_counter() - start
    if len(outputs) != 1:
        raise BenchmarkError(
            f"a prompt of {len(prompt)} tokens must give its first token in one step, it did not; "
            "lower the prompt's length below the engine's max_num_batched_tokens"
        )
    engine.check(request, outputs[0])
    return seconds
