"""How the cost of intervening grows with requests, layers, generated tokens and saved bytes.

For plans and for traces. Whole requests with interventions against the same without, on one engine by turns.
The cost of a size is the difference; on double-logarithmic axes its slope is 1 where it grows as the size
does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from benchmarks.case import Case, Measure, Plan, Sample, Sampler
from benchmarks.decoding import Prompts
from benchmarks.engine import Engine
from benchmarks.interventions import OperationsOf, captured, every, lowest, middle, nothing, steered, traced
from benchmarks.precision import DTYPE_NAME

MAX_LINEAR: Final = 1.1
"""Slope up to which growth counts as linear: that of a straight line, and some error."""

_REQUESTS: Final = (1, 2, 4, 8, 16, 32)
_LAYERS: Final = (1, 3, 10, 30)
_TOKENS: Final = (8, 16, 32, 64)
_BATCH: Final = 8
_PROMPT: Final = 16
_LONG_PROMPT: Final = 512
_GENERATED: Final = 16
_ROW_BYTES: Final = 576 * 2
"""Bytes that one layer of the bundled model returns at one position."""
_MEMORY_BOUND: Final = (
    "From some 12 MB on the allocator gives a request's memory back to the kernel, which hands out empty "
    "pages to the next one; below, a request finds the memory of the one before."
)
_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, {mode}, one engine, in one process. Requests run whole, by turns without
interventions and with them; the difference is the cost. The slope is that of a straight line through the
logarithms of sizes and median costs, over sizes whose cost is above 0 in three of four repetitions: 1 is
linear growth, and up to {linear} counts as such."""


@dataclasses.dataclass(frozen=True, slots=True)
class GrowthPoint:
    """Requests of one size on their axis."""

    size: int
    num_requests: int
    prompt_tokens: int
    num_tokens: int
    operations_of: OperationsOf


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """One curve: the same work at several sizes; ``bound`` says what limits it."""

    name: str
    axis: str
    points: tuple[GrowthPoint, ...]
    bound: str = ""


def growths() -> list[Growth]:
    """Return every curve."""
    return [
        _by_requests("each its own vector at all layers", steered(every)),
        _by_requests("last token captured at all layers", captured(every, "generated", "last")),
        _by_requests("a trace saves one layer", traced(middle)),
        _by_layers("each its own vector", {n: steered(lowest(n)) for n in _LAYERS}),
        _by_layers("last token captured", {n: captured(lowest(n), "generated", "last") for n in _LAYERS}),
        _by_layers("a trace saves each", {n: traced(lowest(n)) for n in _LAYERS}),
        _by_tokens("each its own vector at all layers", steered(every)),
        _by_tokens("every token captured at all layers", captured(every, "generated")),
        _by_tokens("a trace saves one layer", traced(middle)),
        _by_bytes("a prompt captured", {n: captured(lowest(n), "prompt") for n in _LAYERS}),
        _by_bytes("a trace saves a prompt", {n: traced(lowest(n)) for n in _LAYERS}),
    ]


def _by_requests(name: str, operations_of: OperationsOf) -> Growth:
    return Growth(
        name, "requests", tuple(GrowthPoint(n, n, _PROMPT, _GENERATED, operations_of) for n in _REQUESTS)
    )


def _by_layers(name: str, operations_of: Mapping[int, OperationsOf]) -> Growth:
    points = (GrowthPoint(n, _BATCH, _PROMPT, _GENERATED, one) for n, one in operations_of.items())
    return Growth(f"{name}, {_BATCH} requests", "layers", tuple(points))


def _by_tokens(name: str, operations_of: OperationsOf) -> Growth:
    points = (GrowthPoint(n, _BATCH, _PROMPT, n, operations_of) for n in _TOKENS)
    return Growth(f"{name}, {_BATCH} requests", "generated tokens", tuple(points))


def _by_bytes(name: str, operations_of: Mapping[int, OperationsOf]) -> Growth:
    points = (
        GrowthPoint(n * _LONG_PROMPT * _ROW_BYTES, 1, _LONG_PROMPT, 1, one)
        for n, one in operations_of.items()
    )
    return Growth(f"{name} of {_LONG_PROMPT} tokens", "saved bytes", tuple(points), _MEMORY_BOUND)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose curves."""
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORDS", help="curves with this in their name or axis"
    )


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Load the engine and return the cases."""
    curves = [
        growth
        for growth in growths()
        if not args.only or any(word in f"{growth.name}, {growth.axis}" for word in args.only)
    ]
    most = max((point.num_requests for growth in curves for point in growth.points), default=1)
    engine = Engine(able=True, eager=args.mode == "eager", max_num_seqs=most)
    runs = Runs(engine)
    method = _METHOD.format(dtype=DTYPE_NAME, mode=args.mode, linear=MAX_LINEAR)
    cases = [
        Case(one.name, f"by {one.axis}", partial(runs.warmed_up, one), measures_of(one)) for one in curves
    ]
    name = f"scaling-{args.mode}"
    return Plan(name, f"What growing costs, {args.mode}", method, cases, in_rounds=True)


def measures_of(growth: Growth) -> tuple[Measure, ...]:
    """Return a curve's measures: the cost and the ratio of each size, and the slope of all."""
    sizes = [point.size for point in growth.points]
    return (
        *(Measure(f"cost at {size}, ms", partial(_cost_ms, size)) for size in sizes),
        *(Measure(f"with / without at {size}", partial(_ratio, size)) for size in sizes),
        Measure("slope", None, MAX_LINEAR, bound=growth.bound, of_all=partial(slope, sizes)),
    )


def _cost_ms(size: int, sample: Sample) -> float:
    return 1e3 * (sample[f"with, {size}"] - sample[f"without, {size}"])


def _ratio(size: int, sample: Sample) -> float:
    return sample[f"with, {size}"] / sample[f"without, {size}"]


def slope(sizes: Sequence[int], samples: Sequence[Sample]) -> float | None:
    """Return the power of the size by which costs grow; None where fewer than two stand out of the noise."""
    costs = {size: [_cost_ms(size, sample) for sample in samples] for size in sizes}
    medians = {size: float(np.median(own)) for size, own in costs.items() if np.quantile(own, 0.25) > 0}
    if len(medians) < 2:
        return None
    return float(np.polyfit(np.log(list(medians)), np.log(list(medians.values())), 1)[0])


class Runs:
    """Whole runs of requests on one engine."""

    def __init__(self, engine: Engine) -> None:
        """Start a stream of prompts."""
        self._engine = engine
        self._prompts = Prompts(engine.vocab_size)
        self._is_reversed = False

    def warmed_up(self, growth: Growth) -> Sampler:
        """Return what runs all sizes of a curve, after one repetition that does not count."""
        self._sample(growth)
        return partial(self._sample, growth)

    def _sample(self, growth: Growth) -> Sample:
        sample = {}
        for point in growth.points:
            sides = [("without", nothing), ("with", point.operations_of)]
            for name, operations_of in reversed(sides) if self._is_reversed else sides:
                sample[f"{name}, {point.size}"] = self._seconds(point, operations_of)
            self._is_reversed = not self._is_reversed
        return sample

    def _seconds(self, point: GrowthPoint, operations_of: OperationsOf) -> float:
        engine = self._engine
        prompts = self._prompts.batch(point.num_requests, point.prompt_tokens)
        start = time.perf_counter()
        requests = [
            engine.submit(prompt, point.num_tokens, operations_of(index, engine.shape))
            for index, prompt in enumerate(prompts)
        ]
        engine.finish(requests)
        return time.perf_counter() - start
