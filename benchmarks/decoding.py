"""Requests that decode together on one engine, and the time that their steps take.

Asynchronous vLLM starts a step before it has the results of the last one. So a step may still run on the GPU
when a turn ends, and an engine's next turn finds nothing under way. Each turn therefore waits for the GPU and
runs a step that is not timed: while the clock runs, one step is always under way, as in serving.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, TypeVar

import numpy as np
import torch

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
        self._num_timed, self._num_tokens, self._seconds = num_turns * TURN_STEPS, 0, 0.0
        # Prefill gives one token; one more than all turns, so that ending is not timed.
        max_tokens = 1 + _WARMUP_STEPS + num_turns * (1 + TURN_STEPS) + 1
        self._requests = [
            engine.submit(prompt, max_tokens, content_of(index, engine.shape))
            for index, prompt in enumerate(prompts)
        ]
        for _ in range(1 + _WARMUP_STEPS):
            engine.step()

    def run_turn(self) -> None:
        """Run one turn and time it, but for its first step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._engine.step()
        num_before, start = self._engine.num_tokens, time.perf_counter()
        for _ in range(TURN_STEPS):
            self._engine.step()
        self._seconds += time.perf_counter() - start
        self._num_tokens += self._engine.num_tokens - num_before

    def finish(self) -> float:
        """End the requests, check them, and return the seconds in which each got a token, on average."""
        num_requests = len(self._requests)
        self._engine.finish(self._requests)
        num_wanted = num_requests * self._num_timed
        if self._num_tokens != num_wanted:
            raise BenchmarkError(
                f"a batch of {num_requests} must generate {num_wanted} tokens in {self._num_timed} steps, it "
                f"generated {self._num_tokens}; the scheduler did not run it as one batch"
            )
        return self._seconds * num_requests / self._num_tokens


def mirrored(first: T, second: T, num_turns: int) -> Iterator[T]:
    """Yield each side ``num_turns`` times: first, second, second, first, …."""
    for turn in range(num_turns):
        yield from (first, second) if turn % 2 == 0 else (second, first)


def first_token_s(engine: StepwiseEngine, prompt: list[int], content: Content) -> float:
    """Return the seconds from submitting a request to its first token."""
    start = time.perf_counter()
    request = engine.submit(prompt, 1, content)
    for _ in range(1 + engine.num_ahead):
        outputs = engine.step()
    seconds = time.perf_counter() - start
    if len(outputs) != 1:
        raise BenchmarkError(
            f"a prompt of {len(prompt)} tokens must give its first token in one step, it did not; "
            "lower the prompt's length below the engine's max_num_batched_tokens"
        )
    engine.check(request, outputs[0])
    return seconds
