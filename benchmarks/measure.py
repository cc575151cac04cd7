"""One repetition of one case: the plain engine and ours take turns at the same work.

Turns are strict, short and in mirrored order (plain, ours, ours, plain, …), so that what the
machine does beside meets both sides alike; only one engine runs at a time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Final, TypeVar

import numpy as np

from benchmarks.asked import Asked
from benchmarks.cases import TURN_STEPS, Case, Quantity
from benchmarks.engine import BenchmarkError, Engine, Submitted

_WARM_STEPS: Final = 4
"""Decode steps before the clock starts, prefill not counted."""

_FIRST_TOKEN_ROUNDS: Final = 4
"""Requests on each side in one repetition of a first-token case."""

_LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens in the bundled model."""


Side = TypeVar("Side")


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One repetition: tokens per second, or milliseconds, of the plain engine and of ours."""

    plain: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours as a multiple of plain."""
        return self.ours / self.plain


class Measurer:
    """Measures cases on two engines that live side by side.

    Args:
        plain: vLLM as it comes.
        ours: The engine that can intervene.
        control: Another like ``plain``.
        num_steps: Timed decode steps per side and repetition, a multiple of ``TURN_STEPS``.
    """

    def __init__(self, plain: Engine, ours: Engine, control: Engine, num_steps: int) -> None:
        """Keep the engines and start a stream of prompts."""
        self._plain = plain
        self._ours = ours
        self._control = control
        self._num_turns = num_steps // TURN_STEPS
        self._random = np.random.default_rng(0)

    def measure(self, case: Case) -> Pair:
        """Run one repetition; raises BenchmarkError when it did not do what the case says."""
        if case.variant.quantity is Quantity.DECODE:
            return self._decode(case)
        return self._first_token(case)

    def _prompt(self, num_tokens: int) -> list[int]:
        # Never the same twice, so that no side finds a prefix in its cache.
        ids: list[int] = self._random.integers(_LOWEST_TOKEN, self._plain.vocab_size, num_tokens).tolist()
        return ids

    def _decode(self, case: Case) -> Pair:
        prompts = [self._prompt(case.prompt_tokens) for _ in range(case.num_requests)]
        num_timed = self._num_turns * TURN_STEPS
        plain = Batch(self._plain, num_timed)
        other = self._control if case.variant.control else self._ours
        ours = Batch(other, num_timed)
        for index, prompt in enumerate(prompts):
            plain.add(prompt, [])
            ours.add(prompt, case.variant.for_request(index, other.shape))
        for batch in (plain, ours):
            batch.warm_up()
        for batch in _turns(plain, ours, self._num_turns):
            batch.run_turn()
        return Pair(plain.finish(), ours.finish())

    def _first_token(self, case: Case) -> Pair:
        seconds = {id(self._plain): 0.0, id(self._ours): 0.0}
        prompts: dict[int, list[int]] = {}
        counts = dict.fromkeys(seconds, 0)
        for engine in _turns(self._plain, self._ours, _FIRST_TOKEN_ROUNDS):
            turn = counts[id(engine)]
            counts[id(engine)] += 1
            prompt = prompts.setdefault(turn, self._prompt(case.prompt_tokens))
            asked: Asked = [] if engine is self._plain else case.variant.for_request(0, engine.shape)
            seconds[id(engine)] += _seconds_to_first_token(engine, prompt, asked)
        milliseconds = [1000 * total / _FIRST_TOKEN_ROUNDS for total in seconds.values()]
        return Pair(*milliseconds)


class Batch:
    """Requests that start together on one engine, and the time their decode steps take.

    Args:
        engine: Where they run; nothing else runs there meanwhile.
        num_timed: Steps that will be timed.
    """

    def __init__(self, engine: Engine, num_timed: int) -> None:
        """Start empty."""
        self._engine = engine
        self._requests: list[Submitted] = []
        # Prefill gives one token; one more than is timed, so that ending is not.
        self._max_tokens = 1 + _WARM_STEPS + num_timed + 1
        self._seconds = 0.0
        self._num_timed = num_timed

    def add(self, prompt: list[int], asked: Asked) -> None:
        """Queue one request."""
        self._requests.append(self._engine.submit(prompt, self._max_tokens, asked))

    def warm_up(self) -> None:
        """Prefill all prompts, which takes one step, and run the steps that are not timed."""
        for _ in range(1 + _WARM_STEPS):
            self._engine.step()

    def run_turn(self) -> None:
        """Run and time one turn."""
        start = time.perf_counter()
        for _ in range(TURN_STEPS):
            self._engine.step()
        self._seconds += time.perf_counter() - start

    def finish(self) -> float:
        """End the requests and return the decode throughput, tokens per second."""
        num_left = self._engine.finish(self._requests)
        # Had one step served fewer requests than all, the batch would need more steps to end.
        if num_left != 1:
            raise BenchmarkError(
                f"a batch of {len(self._requests)} must end one step after the last timed one, it took "
                f"{num_left}; the scheduler did not run it as one batch"
            )
        return len(self._requests) * self._num_timed / self._seconds


def _turns(first: Side, second: Side, num_turns: int) -> Iterable[Side]:
    """Yield each side ``num_turns`` times in mirrored order."""
    for turn in range(num_turns):
        yield from (first, second) if turn % 2 == 0 else (second, first)


def _seconds_to_first_token(engine: Engine, prompt: list[int], asked: Asked) -> float:
    start = time.perf_counter()
    request = engine.submit(prompt, 1, asked)
    outputs = engine.step()
    seconds = time.perf_counter() - start
    if len(outputs) != 1:
        raise BenchmarkError(
            f"a prompt of {len(prompt)} tokens must give its first token in one step, it did not; "
            "lower the prompt's length below the engine's max_num_batched_tokens"
        )
    engine.check(request, outputs[0])
    return seconds
