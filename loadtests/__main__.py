"""A load test of a server over HTTP, with a verdict.

    python -m loadtests [SCENARIO] [--shape steady|spike|soak] [--time 120] [--users 1]
        [--url URL] [--admin-key-file FILE] [--thresholds FILE] [--output FOLDER] [-- SERVE OPTIONS]

Writes ``report.html``, locust's own report, and ``summary.json``, and prints the table. Exits with 0 if every
threshold was met, with 1 if one was missed, with 2 if the run failed. ``docs/load-testing.md`` explains the
results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.machine import announced_machine
from benchmarks.servers import ServerError
from loadtests.command import add_server_options, split_arguments
from loadtests.run_process import SUMMARY_FILE, RunError, run_in_process
from loadtests.run_spec import SCENARIOS, SHAPES, counts_of
from loadtests.server_setup import LoadTestError, server_at
from loadtests.summary import HEAD, Summary, cells, write
from loadtests.thresholds import DEFAULT_FILE, ThresholdError, judged, read

_MISSED: Final = 1
_NO_RUN: Final = 2
_OUTPUT: Final = Path("build/loadtest")
_BUSY: Final = 0.8


def main() -> int:
    """Run the command line and return its exit status."""
    args, console = _arguments(), Console()
    try:
        summary = _run(args, console)
    except (LoadTestError, RunError, ServerError, ThresholdError) as error:
        Console(stderr=True).print(f"loadtests: {error}", markup=False, soft_wrap=True)
        return _NO_RUN
    _show(summary, console)
    console.print(f"Written to {args.output}: report.html, {SUMMARY_FILE}", soft_wrap=True)
    return 0 if summary.is_kept else _MISSED


def _run(args: argparse.Namespace, console: Console) -> Summary:
    thresholds = read(args.thresholds)
    machine = announced_machine(console)
    with (
        server_at(args.url, args.admin_key or "", args.serve) as server,
        server.prepared_run(
            args.scenario, args.shape, args.time, counts_of(args.scenario, args.users)
        ) as spec,
    ):
        console.print(f"{args.scenario}, {args.shape}, for {args.time:g} s at {server.url}", soft_wrap=True)
        summary = judged(run_in_process(spec, args.output, machine), thresholds)
    write(args.output / SUMMARY_FILE, summary)
    return summary


def _show(summary: Summary, console: Console) -> None:
    table = Table()
    for name in HEAD:
        table.add_column(name, justify="left" if name in HEAD[:2] else "right")
    for row in summary.rows:
        table.add_row(*cells(row))
    # Printed at full width: a file has no width, and truncated numbers are useless.
    Console(file=console.file, width=max(console.width, 200)).print(table)
    for error, count in summary.errors.items():
        console.print(f"failed {count} times: {error}", markup=False, soft_wrap=True)
    for crash in summary.crashes:
        console.print(f"a user crashed: {crash}", markup=False, soft_wrap=True)
    for verdict in summary.verdicts:
        found = "no number" if verdict.value is None else f"{verdict.value:.3g}"
        label = "kept  " if verdict.is_kept else "MISSED"
        console.print(
            f"{label} {verdict.rule}: {found}", style="" if verdict.is_kept else "red", soft_wrap=True
        )
    if summary.client_cpu > _BUSY:
        console.print(f"The sender used {summary.client_cpu:.0%} of a core: it may have measured itself.")


def _arguments() -> argparse.Namespace:
    own, serve = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m loadtests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="?", default="mixed", choices=SCENARIOS)
    parser.add_argument("--shape", default="steady", choices=SHAPES)
    parser.add_argument("--time", type=float, default=120.0, help="seconds")
    parser.add_argument("--users", type=int, default=1, help="multiplies the users of every kind")
    add_server_options(parser)
    parser.add_argument("--thresholds", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    args = parser.parse_args(own)
    if args.time <= 0 or args.users < 1:
        parser.error("--time and --users must be more than 0")
    args.serve = serve
    return args


if __name__ == "__main__":
    sys.exit(main())
