"""``make bench``: speed of an engine that can intervene, against plain vLLM on the same machine.

    python -m benchmarks [--mode eager|compiled|both] [--batches 1 8 32] [--repeats 7] [--quick]

Run it on a machine that does nothing else. Memory, start-up and traces have commands of their own: ``python
-m benchmarks.idle_memory``, ``benchmarks.startup``, ``benchmarks.tracing`` and ``benchmarks.engine_traces``.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.cases import TURN_STEPS, all_cases
from benchmarks.machine import Machine, announced_machine
from benchmarks.processes import HUGE_PAGES, ChildError, run_child
from benchmarks.ratios import summarize
from benchmarks.report import Report
from nnsight_engine.modeling.bundled import BundledModelError, bundled_model_path
from nnsight_engine.modeling.progress import console_progress

_SUMMARY: Final = "Speed of an engine that can intervene, against plain vLLM on the same machine."
_RESULTS: Final = Path(__file__).parent / "results"
_MODES: Final = {"eager": ["eager"], "compiled": ["compiled"], "both": ["eager", "compiled"]}


def main() -> int:
    """Run the command line and return its exit status."""
    args = _arguments()
    console = Console()
    machine = announced_machine(console)
    try:
        with console_progress("Bundled model") as progress:
            bundled_model_path(progress=progress)
        for mode in _MODES[args.mode]:
            report = _run(mode, args, machine, console)
            for table in report.tables():
                console.print(table)
            if args.quick:
                console.print("Quick: nothing was written.")
            else:
                console.print(f"Written to {report.write(args.output)}", soft_wrap=True)
    except (BundledModelError, ChildError) as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=_SUMMARY)
    parser.add_argument("--mode", choices=sorted(_MODES), default="both")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32], help="requests that run together"
    )
    parser.add_argument("--repeats", type=int, default=7, help="repetitions of every case")
    parser.add_argument(
        "--steps", type=int, default=48, help=f"timed decode steps, a multiple of {TURN_STEPS}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 repetitions of 16 steps, printed and not written"
    )
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the tables")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.steps = 2, 2 * TURN_STEPS
    if args.repeats < 1 or min(args.batches) < 1 or args.steps < 1 or args.steps % TURN_STEPS:
        parser.error(f"repeats and batches must be positive and steps a multiple of {TURN_STEPS}")
    return args


def _run(mode: str, args: argparse.Namespace, machine: Machine, console: Console) -> Report:
    cases = all_cases(args.batches)
    plain: dict[str, list[float]] = defaultdict(list)
    ours: dict[str, list[float]] = defaultdict(list)
    options = ["--mode", mode, "--repeats", str(args.repeats), "--steps", str(args.steps)]
    options += ["--batches", *map(str, args.batches)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(mode, total=args.repeats * len(cases))
        for event in run_child("benchmarks.worker", options, HUGE_PAGES):
            if "stage" in event:
                progress.update(task, description=f"{mode}: {event['stage']}")
            else:
                plain[event["case"]].append(event["plain"])
                ours[event["case"]].append(event["ours"])
                progress.advance(task)
    rows = [summarize(case, plain[case.key], ours[case.key]) for case in cases]
    return Report(mode, machine, args.steps, rows)


if __name__ == "__main__":
    sys.exit(main())
