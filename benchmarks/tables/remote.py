"""What it costs to run a trace on a server rather than in its process, on loopback.

One server, in this process; one client, in another. A trace that saves one layer's last token, from the
client's ``with`` statement to its variable, against the same message handed to the same engine in the
server's process. And a trace that saves 50 MB, against one that computes the same and saves a number of it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Final

from benchmarks.case import Case, Plan, Sample, difference
from benchmarks.clients.trace_client import SAVED_BYTES
from benchmarks.clients.trace_server import BenchmarkServer, ServedTraces
from benchmarks.machine import touch_free_memory
from benchmarks.precision import DTYPE_NAME
from benchmarks.process import Process
from nnsight_engine.modeling.bundled import bundled_model_path

_OVERHEAD_TARGET_MS: Final = 5.0
_SAVES_TARGET_MS: Final = SAVED_BYTES / 300e6 * 1e3
"""At 300 MB/s."""
_WARMUP: Final = 20
_TURN: Final = 2
"""Traces of one side until it is the other's turn."""
_METHOD: Final = f"""\
SmolLM2-135M-Instruct in {DTYPE_NAME}, eager, served on loopback as `nnsight-engine serve` does; the client is
a process of its own. Of each repetition the medians of 30 traces (5 of those with 50 MB) count. "In the
server's process" is the client's message handed to the server's trace engine, up to the bytes of the result.
"Not saved" computes the same 50 MB and saves one number of them: 167 ms for 50 MB is 300 MB/s. All free
memory was touched once before: where the machine is virtual, the first use of a page waits for its host."""


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Add none."""


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start the server and the client, and return the case."""
    if not args.quick:
        touch_free_memory()
    model = str(bundled_model_path())
    server = stack.enter_context(BenchmarkServer(model))
    inside = ServedTraces(server, model)
    client = stack.enter_context(Process("benchmarks.clients.trace_client", model, server.url))
    client.ask(kind="small", count=_WARMUP)
    client.ask(kind="large", count=2)
    client.ask(kind="unsaved", count=2)
    inside.seconds(_WARMUP)

    def sample() -> Sample:
        remote: list[float] = []
        in_process: list[float] = []
        for _ in range((10 if args.quick else 30) // _TURN):
            remote += client.ask(kind="small", count=_TURN)
            in_process += inside.seconds(_TURN)
        unsaved = client.ask(kind="unsaved", count=3)
        large = client.ask(kind="large", count=5)
        unsaved += client.ask(kind="unsaved", count=2)
        return {
            "remote": statistics.median(remote),
            "in the server's process": statistics.median(in_process),
            "50 MB saved": statistics.median(large),
            "not saved": statistics.median(unsaved),
        }

    measures = (
        difference("remote", "in the server's process", "ms", _OVERHEAD_TARGET_MS),
        difference("50 MB saved", "not saved", "ms", _SAVES_TARGET_MS),
    )
    name = "a trace that saves one layer's last token; one that saves 50 MB"
    case = Case(name, "8 tokens", lambda: sample, measures, "ms")
    return Plan("remote", "Traces on a server", _METHOD, [case])
