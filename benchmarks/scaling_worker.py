"""The process in which growth is measured: ``python -m benchmarks.scaling`` starts it.

One engine runs every size by turns, once without interventions and once with them, whole requests each
time: submitting, all steps, and what they collected.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.asked import ForRequest, nothing
from benchmarks.engine import Engine
from benchmarks.growth import Point, growths
from benchmarks.processes import EventPipe

_LOWEST_TOKEN = 100
"""Ids below it are special tokens in the bundled model."""


def main() -> None:
    """Measure, and report through the event pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["eager", "compiled"], required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--curves", type=int, nargs="+", required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    args = parser.parse_args()
    events = EventPipe(args.events_fd)
    curves = [(number, growths()[number]) for number in args.curves]
    points = [(number, point) for number, growth in curves for point in growth.points]
    events.send({"stage": "loading"})
    most = max(point.num_requests for _, point in points)
    engine = Engine(able=True, eager=args.mode == "eager", max_num_seqs=most)
    runs = Runs(engine)
    events.send({"stage": "warming up"})
    for _, point in points:
        runs.both(point)
    for _ in range(args.repeats):
        for number, point in points:
            idle, ours = runs.both(point)
            events.send({"curve": number, "size": point.size, "idle": idle, "ours": ours})


class Runs:
    """Whole runs of requests on one engine."""

    def __init__(self, engine: Engine) -> None:
        """Start a stream of prompts."""
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._is_idle_first = True

    def both(self, point: Point) -> tuple[float, float]:
        """Return the seconds of a run without interventions, and of one with; they go first by turns."""
        self._is_idle_first = not self._is_idle_first
        if self._is_idle_first:
            idle = self._seconds(point, nothing)
            return idle, self._seconds(point, point.asks)
        ours = self._seconds(point, point.asks)
        return self._seconds(point, nothing), ours

    def _seconds(self, point: Point, asks: ForRequest) -> float:
        engine, shape = self._engine, (point.num_requests, point.prompt_tokens)
        # Never the same twice, so that no run finds a prefix in the engine's cache.
        prompts = self._random.integers(_LOWEST_TOKEN, engine.vocab_size, shape).tolist()
        start = time.perf_counter()
        requests = [
            engine.submit(prompt, point.num_tokens, asks(index, engine.shape))
            for index, prompt in enumerate(prompts)
        ]
        engine.finish(requests)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
