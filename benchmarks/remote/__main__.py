"""What it costs to run a trace on a server rather than in its process, on loopback.

    python -m benchmarks.remote [--repeats 15] [--quick]

One server, in this process; one client, in another. A trace that saves one layer's last token, from the
client's ``with`` statement to its variable, against the same message handed to the same engine in the
server's process. And a trace that saves 50 MB, against one that computes the same and saves a number of it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.precision import DTYPE_NAME
from benchmarks.processes import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # vLLM reads it when it is imported

from rich.console import Console

from benchmarks.command import parsed, parser_of, show
from benchmarks.machine import announced_machine, touch_free_memory
from benchmarks.remote.blocks import LAYER, PROMPT, SAVED_BYTES
from benchmarks.remote.server import BenchmarkServer, result_of
from benchmarks.tracing.report import Report
from benchmarks.tracing.timing import Case, Measure, Row, Sample, measure
from nnsight_engine import bundled_model_path, save
from nnsight_engine.remote_backend.backend import RemoteBackend
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.http import HttpTransport
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.remote_backend.transport import Progress
from nnsight_engine.vllm_backend.vllm import VLLM

_OVERHEAD_TARGET_MS: Final = 5.0
_SAVES_TARGET_MS: Final = SAVED_BYTES / 300e6 * 1e3
"""At 300 MB/s."""
_WARM: Final = 20
_TURN: Final = 2
"""Traces of one side until it is the other's turn."""


class _Kept(HttpTransport):
    """Keeps the message that a trace sends."""

    request: TraceRequest

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        self.request = request
        yield from super().run(request, progress)


def message(model: str, url: str) -> TraceRequest:
    """Return the message of the small trace, as the client sends it."""
    client, transport = VLLM(model, remote=url), _Kept(url)
    with client.trace(PROMPT, max_tokens=1, temperature=0, backend=RemoteBackend(transport=transport)):
        hidden = save(client.layers[LAYER].output[-1])
    del hidden
    return transport.request


class Sides:
    """The client's traces and the server's own, by turns."""

    def __init__(self, server: BenchmarkServer, model: str, count: int) -> None:
        """Start the client and warm both sides up."""
        self._server, self._count = server, count
        self._request = message(model, server.url)
        self._numbers = itertools.count()
        self._client = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.remote.client", model, server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask("small", _WARM)
        self._ask("large", 2)
        self._ask("unsaved", 2)
        self._inside(_WARM)

    def __call__(self) -> Sample:
        """Run one repetition: seconds of one trace of each side, medians."""
        remote: list[float] = []
        inside: list[float] = []
        for _ in range(self._count // _TURN):  # what slows the machine down for a while is to hit both
            remote += self._ask("small", _TURN)
            inside += self._inside(_TURN)
        unsaved = self._ask("unsaved", 3)
        large = self._ask("large", 5)
        unsaved += self._ask("unsaved", 2)
        return {
            "remote": statistics.median(remote),
            "in the server's process": statistics.median(inside),
            "50 MB saved": statistics.median(large),
            "not saved": statistics.median(unsaved),
        }

    def _ask(self, kind: str, count: int) -> list[float]:
        assert self._client.stdin is not None  # noqa: S101 - they are pipes
        assert self._client.stdout is not None  # noqa: S101
        self._client.stdin.write(json.dumps({"kind": kind, "count": count}) + "\n")
        self._client.stdin.flush()
        seconds: list[float] = json.loads(self._client.stdout.readline())
        return seconds

    def _inside(self, count: int) -> list[float]:
        return self._server.wait(self._inside_there(count))

    async def _inside_there(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            await result_of(self._server.traces, self._request, f"inside-{next(self._numbers)}")
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        """End the client."""
        assert self._client.stdin is not None  # noqa: S101 - it is a pipe
        self._client.stdin.close()
        self._client.wait()


def _over(sample: Sample) -> float:
    return 1e3 * (sample["remote"] - sample["in the server's process"])


def _saving(sample: Sample) -> float:
    return 1e3 * (sample["50 MB saved"] - sample["not saved"])


def main() -> int:
    """Run the command line and return its exit status."""
    args = parsed(parser_of("benchmarks.remote", __doc__, repeats=15), quick_repeats=4)
    console = Console()
    machine = announced_machine(console)
    if not args.quick:
        touch_free_memory()
    model = str(bundled_model_path())
    with BenchmarkServer(model) as server:
        sides = Sides(server, model, 10 if args.quick else 30)
        case = Case(
            "a trace that saves one layer's last token; one that saves 50 MB",
            "8 tokens",
            lambda: sides,
            (
                Measure("remote - in the server's process, ms", _over, _OVERHEAD_TARGET_MS),
                Measure("50 MB saved - not saved, ms", _saving, _SAVES_TARGET_MS),
            ),
        )
        rows: list[Row] = measure(case, args.repeats)
        sides.close()
    method = _METHOD.format(repeats=args.repeats, dtype=DTYPE_NAME)
    report = Report(machine, "remote", "Traces on a server", method, [args.repeats], rows)
    show(report, console, args)
    return 0


_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, eager, served on loopback as `nnsight-engine serve` does; the client is a
process of its own. Of each repetition the medians of 30 traces (5 of those with 50 MB) count. "In the
server's process" is the client's message handed to the server's trace engine, up to the bytes of the result.
"Not saved" computes the same 50 MB and saves one number of them: 167 ms for 50 MB is 300 MB/s. All free
memory was touched once before: where the machine is virtual, the first use of a page waits for its host. A
figure is the median over {repeats} repetitions. Made by `python -m benchmarks.remote --repeats {repeats}`."""


if __name__ == "__main__":
    sys.exit(main())
