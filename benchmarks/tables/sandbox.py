"""What it costs to run a trace in a sandbox rather than in the worker, and a plain batch beside it.

One server, in this process. The same message, which saves one layer's last token, is handed to its engine as
an untrusted and as a trusted sender's, by turns. And a batch of plain requests is run while traces of either
kind come one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections import defaultdict
from typing import Final

import httpx

from benchmarks.case import Case, Plan, Sample, difference, ratio
from benchmarks.clients.trace_server import BenchmarkServer, ServedTraces
from benchmarks.precision import DTYPE_NAME
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_MS: Final = 2.0
_TARGET_RATIO: Final = 1 / 0.97
_WARMUP: Final = 20
_PLAIN: Final = {"prompt": "I think dogs are", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
_NUM_PLAIN: Final = 4
_ORDER: Final = ("sandboxed", "trusted", "trusted", "sandboxed")
"""Mirrored, so that a machine that becomes slower, or faster, does so for both."""
_PAUSE_S: Final = 0.25
"""Between traces beside the batch: as many of either kind, however long each takes."""
_METHOD: Final = f"""\
SmolLM2-135M-Instruct in {DTYPE_NAME}, eager. Of each repetition the medians of 30 traces of either kind
count, by turns, from the message to the bytes of the result, in the server's process. Beside the traces of
one kind, one every quarter of a second, 4 plain requests of 32 tokens each, twice by turns; 1.031 is 0.97 of
the speed."""


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Add none."""


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start the server and return the case."""
    model = str(bundled_model_path())
    server = stack.enter_context(BenchmarkServer(model))
    traces = ServedTraces(server, model)
    server.wait(server.engine.engine.prepare_sandbox())
    for kind in ("sandboxed", "trusted"):
        traces.seconds(_WARMUP, is_sandboxed=kind == "sandboxed")
    half = 5 if args.quick else 15

    def sample() -> Sample:
        seconds: dict[str, list[float]] = defaultdict(list)
        for kind in _ORDER:
            seconds[kind] += traces.seconds(half, is_sandboxed=kind == "sandboxed")
        for kind in _ORDER:
            took = server.wait(_batch_s(server.url, traces, is_sandboxed=kind == "sandboxed"))
            seconds[f"batch beside {kind}"].append(took)
        return {name: statistics.median(own) for name, own in seconds.items()}

    measures = (
        difference("sandboxed", "trusted", "ms", _TARGET_MS),
        ratio("batch beside sandboxed", "batch beside trusted", _TARGET_RATIO),
    )
    name = "a trace that saves one layer's last token; a plain batch beside such traces"
    case = Case(name, "8 tokens", lambda: sample, measures, "ms")
    return Plan("sandbox", "Traces in a sandbox", _METHOD, [case])


async def _batch_s(url: str, traces: ServedTraces, *, is_sandboxed: bool) -> float:
    """Return the seconds of a plain batch beside traces that come at a steady rate."""

    async def beside() -> None:
        while True:
            await traces.run_one(is_sandboxed=is_sandboxed)
            await asyncio.sleep(_PAUSE_S)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        running = asyncio.create_task(beside())
        start = time.perf_counter()
        await asyncio.gather(*(client.post("/v1/completions", json=_PLAIN) for _ in range(_NUM_PLAIN)))
        seconds = time.perf_counter() - start
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return seconds
