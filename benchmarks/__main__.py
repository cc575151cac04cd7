"""``make bench``: speed of an engine that can intervene, against plain vLLM on the same machine.

    python -m benchmarks [--mode eager|compiled|both] [--batches 1 8 32 64] [--prompts 16 512] [--processes 3]
        [--repeats 5] [--only WORDS …] [--quantity decode|first_token] [--add] [--quick]

Run it on a machine that does nothing else. ``--only``, ``--batches`` and ``--quantity`` cut it into shorter
runs, of which ``--add`` makes one table. docs/development.md lists the other commands.
"""

from __future__ import annotations

import argparse
import shlex
import sys
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

from benchmarks.cases import Case
from benchmarks.machine import Machine, announced_machine
from benchmarks.processes import HUGE_PAGES, ChildError, run_child
from benchmarks.ratios import summarize
from benchmarks.report import Report, ReportError, check_addable
from benchmarks.selection import add_options, as_options, check_options
from nnsight_engine.modeling.bundled import BundledModelError, bundled_model_path
from nnsight_engine.modeling.progress import console_progress

_SUMMARY: Final = "Speed of an engine that can intervene, against plain vLLM on the same machine."
_RESULTS: Final = Path(__file__).parent / "results"
_PROCESSES: Final = 3
_MODES: Final = {"eager": ["eager"], "compiled": ["compiled"], "both": ["eager", "compiled"]}


def main() -> int:
    """Run the command line and return its exit status."""
    args, cases = _arguments()
    console = Console()
    machine = announced_machine(console)
    try:
        if args.add:  # told before the measuring, not behind it
            for mode in _MODES[args.mode]:
                check_addable(args.output, mode, machine)
        with console_progress("Bundled model") as progress:
            bundled_model_path(progress=progress)
        for mode in _MODES[args.mode]:
            report = _run(mode, args, cases, machine, console)
            if args.add:
                report = report.added_to(args.output)
            for table in report.tables():
                console.print(table)
            if args.quick:
                console.print("Quick: nothing was written.")
            else:
                console.print(f"Written to {report.write(args.output)}", soft_wrap=True)
    except (BundledModelError, ChildError, ReportError) as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    return 0


def _arguments() -> tuple[argparse.Namespace, list[Case]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=_SUMMARY)
    parser.add_argument("--mode", choices=sorted(_MODES), default="both")
    add_options(parser)
    parser.add_argument(
        "--add", action="store_true", help="keep what today's table has and this run does not measure"
    )
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the tables")
    parser.add_argument(
        "--processes", type=int, default=_PROCESSES, help="processes, each with engines of its own"
    )
    args = parser.parse_args()
    if args.quick:
        args.processes = 1
    if args.processes < 1:
        parser.error("there must be a process at least")
    return args, check_options(parser, args)


def _run(
    mode: str, args: argparse.Namespace, cases: list[Case], machine: Machine, console: Console
) -> Report:
    plain: dict[str, list[list[float]]] = {case.key: [] for case in cases}
    ours: dict[str, list[list[float]]] = {case.key: [] for case in cases}
    options = ["--mode", mode, *as_options(args)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(mode, total=args.processes * args.repeats * len(cases))
        for process in range(args.processes):
            for case in cases:
                plain[case.key].append([])
                ours[case.key].append([])
            for event in run_child("benchmarks.worker", [*options, "--process", str(process)], HUGE_PAGES):
                if "stage" in event:
                    stage = f"{mode}, process {process + 1} of {args.processes}: {event['stage']}"
                    progress.update(task, description=stage)
                else:
                    plain[event["case"]][-1].append(event["plain"])
                    ours[event["case"]][-1].append(event["ours"])
                    progress.advance(task)
    rows = [summarize(case, mode, plain[case.key], ours[case.key], args.steps) for case in cases]
    command = shlex.join([*options, "--processes", str(args.processes)])
    return Report(mode, machine, [f"python -m benchmarks {command}"], rows)


if __name__ == "__main__":
    sys.exit(main())
