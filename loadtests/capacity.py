"""How much one server does, by the number of requests that run at once: plain ones alone, and beside others.

    python -m loadtests.capacity [--concurrency 1 2 4 8 16 32] [--loads plain mixed] [--seconds 24] [--add]
        [--url URL] [--admin-key-file FILE] [--output FOLDER] [-- SERVE OPTIONS]

Each user sends one request after another without a pause. Under the mixed load half of them are plain, the
neighbours, and the others steer, read the lens and capture. What began in the first quarter does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from benchmarks.files import table_lines, write_report
from benchmarks.machine import Machine, announced_machine, machine_lines
from benchmarks.servers import ServerError
from loadtests.asked import PLAIN, Phase
from loadtests.child import RunError, run_child
from loadtests.command import add_server_options, split_arguments
from loadtests.preparing import LoadTestError, Server, server_at
from loadtests.summary import Percentiles, Summary, read, times_cells

_MEASURED: Final = "measured"
_PHASES: Final = (Phase(name="warm-up", share=0.25), Phase(name=_MEASURED, share=0.75))
_OTHERS: Final = ("steered-different", "lens", "steered-same", "capture")
_LOADS: Final = ("plain", "mixed")
_RESULTS: Final = Path(__file__).parents[1] / "benchmarks" / "results"
_NO_RUN: Final = 2


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        load: ``plain`` or ``mixed``.
        concurrency: Requests that run at once.
        requests_per_s: Of all kinds.
        tokens_per_s: Generated, of all kinds.
        num_failed: Requests that failed, which should be none.
        ttft_ms: Of plain requests, the neighbours' under a mixed load.
        itl_ms: Of the same.
        client_cpu: The part of one core's time that the sender took, on the same machine.
    """

    load: str
    concurrency: int
    requests_per_s: float
    tokens_per_s: float
    num_failed: int
    ttft_ms: Percentiles
    itl_ms: Percentiles
    client_cpu: float


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """A table of them."""

    machine: dict[str, Any]
    points: list[Point]


def counts_of(load: str, concurrency: int) -> dict[str, int]:
    """Return how many users of each kind there are under a load."""
    if load == "plain":
        return {PLAIN: concurrency}
    others = list(itertools.islice(itertools.cycle(_OTHERS), concurrency // 2))
    return {PLAIN: concurrency - len(others), **{kind: others.count(kind) for kind in others}}


def point_of(load: str, concurrency: int, summary: Summary) -> Point:
    """Return the measurement that a run is.

    Raises:
        RunError: No plain request came to its end in it.
    """
    rows = [row for row in summary.rows if row.phase == _MEASURED]
    plain = summary.row(PLAIN, _MEASURED)
    if summary.crashes or plain is None or plain.ttft_ms is None or plain.itl_ms is None:
        raise RunError(f"no plain request was answered in {summary.seconds:.0f} s: {summary.errors}")
    return Point(
        load=load,
        concurrency=concurrency,
        requests_per_s=sum(row.requests_per_s for row in rows),
        tokens_per_s=sum(row.tokens_per_s for row in rows),
        num_failed=sum(row.num_failed for row in rows),
        ttft_ms=plain.ttft_ms,
        itl_ms=plain.itl_ms,
        client_cpu=summary.client_cpu,
    )


def step_of(points: Sequence[Point]) -> tuple[float, float] | None:
    """Return what a step takes, as milliseconds and milliseconds for each request in it, by least squares.

    None of fewer than two plain points: there is no line.
    """
    plain = [point for point in points if point.load == "plain"]
    if len({point.concurrency for point in plain}) < 2:
        return None
    line = statistics.linear_regression(
        [point.concurrency for point in plain], [point.itl_ms.p50 for point in plain]
    )
    return line.intercept, line.slope


def page(machine: Machine, points: Sequence[Point]) -> str:
    """Return the table as markdown."""
    head = (
        "load", "concurrent", "requests/s", "tokens/s", "failed",
        "TTFT p50, ms", "p95", "p99", "ITL p50, ms", "p95", "p99", "sender's CPU",
    )  # fmt: skip
    lines = [*machine_lines(machine, "Capacity"), "", _METHOD, "", *table_lines(head, map(_cells, points))]
    step = step_of(points)
    if step is not None:
        lines += [
            "",
            f"A step of the plain load, by least squares: {step[0]:.1f} ms + {step[1]:.2f} ms a request.",
        ]
    return "\n".join(lines) + "\n"


def _cells(point: Point) -> list[str]:
    return [
        point.load,
        str(point.concurrency),
        f"{point.requests_per_s:.2f}",
        f"{point.tokens_per_s:.1f}",
        str(point.num_failed),
        *times_cells(point.ttft_ms),
        *times_cells(point.itl_ms),
        f"{point.client_cpu:.0%}",
    ]


_METHOD: Final = """\
Made by `python -m loadtests.capacity`: the server with its defaults, one process that sends on the same
cores. Prompts of 32 tokens, answers of 16 to 48; as many users as are concurrent, each with one request after
another and no pause; rates and times are of requests that began after the first quarter of a run. Under the
mixed load half of the users are plain, and times are theirs; the others steer (by one vector, by a new one
each), read the lens of all layers, and capture the prompt."""


def main() -> int:
    """Run the command line and return its exit status."""
    args, console = _arguments(), Console()
    machine = announced_machine(console)
    file = args.output / f"{machine.date}-capacity.json"
    points = read(file, Capacity).points if args.add and file.exists() else []
    try:
        with server_at(args.url, args.admin_key or "", args.serve) as server:
            for load, concurrency in itertools.product(args.loads, args.concurrency):
                if load == "mixed" and concurrency == 1:
                    continue  # there is no neighbour
                point = _measured(server, load, concurrency, args, machine)
                points = [one for one in points if (one.load, one.concurrency) != (load, concurrency)]
                points.append(point)
                console.print(" ".join(_cells(point)))
    except (LoadTestError, RunError, ServerError) as error:
        Console(stderr=True).print(f"loadtests.capacity: {error}", markup=False, soft_wrap=True)
        return _NO_RUN
    points.sort(key=lambda point: (_LOADS.index(point.load), point.concurrency))
    content = msgspec.json.encode(Capacity(machine=dataclasses.asdict(machine), points=points))
    text = msgspec.json.format(content, indent=1).decode() + "\n"
    written = write_report(args.output, file.stem, markdown=page(machine, points), json=text)
    console.print(f"Written to {written}", soft_wrap=True)
    return 0


def _measured(
    server: Server, load: str, concurrency: int, args: argparse.Namespace, machine: Machine
) -> Point:
    counts = counts_of(load, concurrency)
    with server.asked(f"capacity, {load}", "steady", args.seconds, counts) as asked:
        changed = msgspec.structs.replace(asked, phases=list(_PHASES), has_pauses=False)
        summary = run_child(changed, args.reports / f"{load}-{concurrency}", machine)
    return point_of(load, concurrency, summary)


def _arguments() -> argparse.Namespace:
    own, serve = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--loads", nargs="+", choices=_LOADS, default=list(_LOADS))
    parser.add_argument("--seconds", type=float, default=24.0, help="of each run")
    parser.add_argument("--add", action="store_true", help="to the table that the day has")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the table")
    parser.add_argument(
        "--reports", type=Path, default=Path("build/capacity"), help="folder of locust's reports"
    )
    add_server_options(parser)
    args = parser.parse_args(own)
    args.serve = serve
    return args


if __name__ == "__main__":
    sys.exit(main())
