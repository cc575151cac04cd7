"""What it costs to run a trace in a sandbox rather than in the worker, and a plain batch beside it.

    python -m benchmarks.sandbox [--repeats 15] [--quick]

One server, in this process. The same message, which saves one layer's last token, is handed to its engine as
a stranger's and as a trusted sender's, by turns. And a batch of plain requests is run while traces of either
kind come one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import statistics
import sys
import time
from typing import Final

from benchmarks.precision import DTYPE_NAME
from benchmarks.processes import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # vLLM reads it when it is imported

import httpx
from rich.console import Console

from benchmarks.command import parsed, parser_of, show
from benchmarks.machine import announced_machine
from benchmarks.remote.__main__ import message
from benchmarks.remote.server import BenchmarkServer, result_of
from benchmarks.tracing.report import Report
from benchmarks.tracing.timing import Case, Measure, Row, Sample, measure
from nnsight_engine import bundled_model_path

_TARGET_MS: Final = 2.0
_TARGET_RATIO: Final = 1 / 0.97
_WARM: Final = 20
_TENANT: Final = "stranger"
_PLAIN: Final = {"prompt": "I think dogs are", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
_NUM_PLAIN: Final = 4
_TURNS: Final = (True, False, False, True)
"""So that a machine that becomes slower, or faster, does so for both."""
_PAUSE_S: Final = 0.25
"""Between traces beside the batch: as many of either kind, however long each takes."""


class Sides:
    """Traces of both tiers, by turns."""

    def __init__(self, server: BenchmarkServer, model: str, count: int) -> None:
        """Warm both up; the first sandboxed trace waits until there is a sandbox."""
        self._server, self._count = server, count
        self._trusted = message(model, server.url)
        self._stranger = copy.copy(self._trusted)
        self._stranger.sandbox_of = _TENANT
        self._numbers = itertools.count()
        server.wait(server.engine.engine.prepare_sandbox())
        for is_sandboxed in (True, False):
            server.wait(self._traces(_WARM, is_sandboxed=is_sandboxed))

    def __call__(self) -> Sample:
        """Run one repetition."""
        half = self._count // 2
        found: dict[bool, list[float]] = {True: [], False: []}
        batches = {True: 0.0, False: 0.0}
        for is_sandboxed in _TURNS:
            found[is_sandboxed] += self._server.wait(self._traces(half, is_sandboxed=is_sandboxed))
        for is_sandboxed in _TURNS:
            batches[is_sandboxed] += self._server.wait(self._batch(is_sandboxed=is_sandboxed)) / 2
        return {
            "sandboxed": statistics.median(found[True]),
            "trusted": statistics.median(found[False]),
            "batch beside sandboxed": batches[True],
            "batch beside trusted": batches[False],
        }

    async def _traces(self, count: int, *, is_sandboxed: bool) -> list[float]:
        return [await self._one(is_sandboxed=is_sandboxed) for _ in range(count)]

    async def _one(self, *, is_sandboxed: bool) -> float:
        request = self._stranger if is_sandboxed else self._trusted
        start = time.perf_counter()
        await result_of(self._server.traces, request, f"sandbox-{next(self._numbers)}")
        return time.perf_counter() - start

    async def _batch(self, *, is_sandboxed: bool) -> float:
        """Return the seconds of a plain batch beside traces that come at a steady rate."""

        async def beside() -> None:
            while True:
                await self._one(is_sandboxed=is_sandboxed)
                await asyncio.sleep(_PAUSE_S)

        async with httpx.AsyncClient(base_url=self._server.url, timeout=600) as client:
            traces = asyncio.create_task(beside())
            start = time.perf_counter()
            await asyncio.gather(*(client.post("/v1/completions", json=_PLAIN) for _ in range(_NUM_PLAIN)))
            seconds = time.perf_counter() - start
            traces.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await traces
        return seconds


def _over(sample: Sample) -> float:
    return 1e3 * (sample["sandboxed"] - sample["trusted"])


def _ratio(sample: Sample) -> float:
    return sample["batch beside sandboxed"] / sample["batch beside trusted"]


def main() -> int:
    """Run the command line and return its exit status."""
    args = parsed(parser_of("benchmarks.sandbox", __doc__, repeats=15), quick_repeats=4)
    console = Console()
    machine = announced_machine(console)
    model = str(bundled_model_path())
    with BenchmarkServer(model) as server:
        sides = Sides(server, model, 10 if args.quick else 30)
        case = Case(
            "a trace that saves one layer's last token; a plain batch beside such traces",
            "8 tokens",
            lambda: sides,
            (
                Measure("sandboxed - trusted, ms", _over, _TARGET_MS),
                Measure("time of the batch, beside sandboxed / beside trusted", _ratio, _TARGET_RATIO),
            ),
        )
        rows: list[Row] = measure(case, args.repeats)
    method = _METHOD.format(repeats=args.repeats, dtype=DTYPE_NAME)
    report = Report(machine, "sandbox", "Traces in a sandbox", method, [args.repeats], rows)
    show(report, console, args)
    return 0


_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, eager. Of each repetition the medians of 30 traces of either kind count, by
turns, from the message to the bytes of the result, in the server's process. Beside the traces of one kind,
one every quarter of a second, 4 plain requests of 32 tokens each, twice by turns; 1.031 is 0.97 of the speed.
Figures are medians over {repeats} repetitions. Made by `python -m benchmarks.sandbox --repeats {repeats}`."""


if __name__ == "__main__":
    sys.exit(main())
