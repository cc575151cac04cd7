"""How the cost of intervening grows: with requests, layers, generated tokens and saved bytes.

What is measured at which sizes, and how a slope is made of the costs. The cost of a size is what requests
take more when they intervene than when the same engine runs them without; on double-logarithmic axes its
slope is 1 where it grows as the size does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from benchmarks.asked import ForRequest, captured, every, lowest, middle, steered, traced

MOST_LINEAR: Final = 1.1
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


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Requests of one size.

    Attributes:
        size: Where it lies on its axis.
        num_requests: How many run together.
        prompt_tokens: Tokens of each prompt.
        num_tokens: Tokens that each generates.
        asks: What each asks for.
    """

    size: int
    num_requests: int
    prompt_tokens: int
    num_tokens: int
    asks: ForRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """One curve: the same, at several sizes.

    Attributes:
        name: What is done.
        axis: What grows.
        points: The sizes.
        bound: A sentence on what bounds it, told where it grows faster than its sizes.
    """

    name: str
    axis: str
    points: tuple[Point, ...]
    bound: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What a size costs, medians over repetitions.

    Attributes:
        size: Where it lies on its axis.
        idle_s: Seconds without interventions.
        cost_s: Seconds more with them.
        ratio: With them, as a multiple of without.
        is_clear: Whether three of four repetitions found that it costs anything.
    """

    size: int
    idle_s: float
    cost_s: float
    ratio: float
    is_clear: bool


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


def _by_requests(name: str, asks: ForRequest) -> Growth:
    return Growth(name, "requests", tuple(Point(n, n, _PROMPT, _GENERATED, asks) for n in _REQUESTS))


def _by_layers(name: str, asks: Mapping[int, ForRequest]) -> Growth:
    points = (Point(n, _BATCH, _PROMPT, _GENERATED, one) for n, one in asks.items())
    return Growth(f"{name}, {_BATCH} requests", "layers", tuple(points))


def _by_tokens(name: str, asks: ForRequest) -> Growth:
    points = (Point(n, _BATCH, _PROMPT, n, asks) for n in _TOKENS)
    return Growth(f"{name}, {_BATCH} requests", "generated tokens", tuple(points))


def _by_bytes(name: str, asks: Mapping[int, ForRequest]) -> Growth:
    points = (Point(n * _LONG_PROMPT * _ROW_BYTES, 1, _LONG_PROMPT, 1, one) for n, one in asks.items())
    return Growth(f"{name} of {_LONG_PROMPT} tokens", "saved bytes", tuple(points), _MEMORY_BOUND)


def cost_of(size: int, idle: Sequence[float], ours: Sequence[float]) -> Cost:
    """Return what a size costs, out of its repetitions in order."""
    idle_s, more_s = np.asarray(idle), np.asarray(ours) - np.asarray(idle)
    return Cost(
        size=size,
        idle_s=float(np.median(idle_s)),
        cost_s=float(np.median(more_s)),
        ratio=float(np.median(1 + more_s / idle_s)),
        is_clear=bool(np.quantile(more_s, 0.25) > 0),
    )


def slope(costs: Sequence[Cost]) -> float | None:
    """Return the power of the size by which clear costs grow; None where fewer than two are clear."""
    clear = [cost for cost in costs if cost.is_clear and cost.cost_s > 0]
    if len(clear) < 2:
        return None
    sizes, seconds = [cost.size for cost in clear], [cost.cost_s for cost in clear]
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
