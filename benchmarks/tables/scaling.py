"""The growth of the cost of interventions with requests, layers, generated tokens and saved bytes.

Whole requests run on one engine, by turns without interventions and with them; the difference is the cost.
The slope is that of a straight line through the logarithms of sizes and median costs, over sizes whose cost
is above 0 in three of four repetitions: 1 is linear growth, and up to 1.1 counts as such.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from benchmarks.case import BenchmarkCase, Measure, Plan, Sample, Sampler, ratio, slope, total
from benchmarks.decoding import RandomPrompts
from benchmarks.engine import StepwiseEngine
from benchmarks.interventions import ContentOf, captured, every, lowest, middle, nothing, steered, traced
from benchmarks.turns import by_turns

_MAX_LINEAR: Final = 1.1
"""Slope up to which growth counts as linear: that of a straight line, and some error."""

_LAYERS: Final = (1, 3, 10, 30)
_BATCH: Final = 8
_GENERATED: Final = 16
_LONG_PROMPT: Final = 512
_ROW_BYTES: Final = 576 * 2
"""Bytes that one layer of the bundled model returns at one position."""
_MEMORY_BOUND: Final = (
    "From some 12 MB on the allocator gives a request's memory back to the kernel, which hands out empty "
    "pages to the next one; below, a request finds the memory of the one before."
)


class GrowthPoint(NamedTuple):
    """Requests of one size on their axis."""

    size: int
    content_of: ContentOf
    num_requests: int = _BATCH
    prompt_tokens: int = 16
    num_tokens: int = _GENERATED


class Growth(NamedTuple):
    """One curve: the same work at several sizes; ``bound`` is the reason of its limit."""

    name: str
    axis: str
    points: Sequence[GrowthPoint]
    bound: str = ""

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The cost and the ratio of each size, and the slope of all."""
        sizes = [point.size for point in self.points]
        costs = [total(f"cost at {n}, ms", {f"with, {n}": 1, f"without, {n}": -1}, 1e3) for n in sizes]
        ratios = [ratio(f"with, {n}", f"without, {n}") for n in sizes]
        return (*costs, *ratios, slope(sizes, _MAX_LINEAR, self.bound))


def growths() -> list[Growth]:
    """Return every curve."""
    last = partial(captured, phase="generated", reduce="last")

    def by_requests(name: str, content_of: ContentOf) -> Growth:
        points = [GrowthPoint(n, content_of, num_requests=n) for n in (1, 2, 4, 8, 16, 32)]
        return Growth(name, "requests", points)

    def by_layers(name: str, content_at: Callable[..., ContentOf]) -> Growth:
        points = [GrowthPoint(n, content_at(lowest(n))) for n in _LAYERS]
        return Growth(f"{name}, {_BATCH} requests", "layers", points)

    def by_tokens(name: str, content_of: ContentOf) -> Growth:
        points = [GrowthPoint(n, content_of, num_tokens=n) for n in (8, 16, 32, 64)]
        return Growth(f"{name}, {_BATCH} requests", "generated tokens", points)

    def by_bytes(name: str, content_at: Callable[..., ContentOf]) -> Growth:
        sizes = {n: n * _LONG_PROMPT * _ROW_BYTES for n in _LAYERS}
        points = [GrowthPoint(sizes[n], content_at(lowest(n)), 1, _LONG_PROMPT, 1) for n in _LAYERS]
        return Growth(f"{name} of {_LONG_PROMPT} tokens", "saved bytes", points, _MEMORY_BOUND)

    return [
        by_requests("each its own vector at all layers", steered(every)),
        by_requests("last token captured at all layers", last(every)),
        by_requests("a trace saves one layer", traced(middle)),
        by_layers("each its own vector", steered),
        by_layers("last token captured", last),
        by_layers("a trace saves each", traced),
        by_tokens("each its own vector at all layers", steered(every)),
        by_tokens("every token captured at all layers", captured(every, "generated")),
        by_tokens("a trace saves one layer", traced(middle)),
        by_bytes("a prompt captured", partial(captured, phase="prompt")),
        by_bytes("a trace saves a prompt", traced),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose curves."""
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="curves with this in their name or axis"
    )


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Load the engine and return the cases."""
    curves = [one for one in growths() if any(word in f"{one.name}, {one.axis}" for word in args.only)]
    most = max((point.num_requests for growth in curves for point in growth.points), default=1)
    engine = StepwiseEngine(able=True, eager=args.mode == "eager", max_num_seqs=most)
    prompts = RandomPrompts(engine.vocab_size)
    cases = [
        BenchmarkCase(one.name, f"by {one.axis}", partial(_sampler, engine, prompts, one), one.measures)
        for one in curves
    ]
    return Plan(cases, f"-{args.mode}", in_rounds=True)


def _sampler(engine: StepwiseEngine, prompts: RandomPrompts, growth: Growth) -> Sampler:
    """Return a sampler of all sizes of a curve, each with interventions and without."""

    def seconds(point: GrowthPoint, content_of: ContentOf) -> Sample:
        batch = prompts.batch(point.num_requests, point.prompt_tokens)
        start = time.perf_counter()
        requests = [
            engine.submit(prompt, point.num_tokens, content_of(index, engine.shape))
            for index, prompt in enumerate(batch)
        ]
        engine.finish(requests)
        return {"": time.perf_counter() - start}

    return by_turns(
        {
            f"{name}, {point.size}": partial(seconds, point, content_of)
            for point in growth.points
            for name, content_of in (("without", nothing), ("with", point.content_of))
        }
    )
