"""What a trace costs, beside hooks written by hand, on one thread.

    python -m benchmarks.tracing [--only small|language] [--repeats 60] [--language-repeats 7] [--quick]

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.machine import announced_machine
from benchmarks.precision import DTYPE_NAME
from benchmarks.tracing.language import language_cases
from benchmarks.tracing.report import Report
from benchmarks.tracing.small import small_cases
from benchmarks.tracing.timing import Row, measure
from nnsight_engine import BundledModelError

_RESULTS: Final = Path(__file__).parents[1] / "results"
_TITLE: Final = "Tracing, beside hooks written by hand"
_METHOD: Final = """\
On one thread. Sides take turns, call by call or, when they generate, token by token, in mirrored order. A
figure is the median over repetitions ({0} on the small model, {1} on the language model) of what is made of
the sides' times in one; quartiles and the worst repetition beside it.
*ours* is a trace, *hooks* registers PyTorch hooks, runs and removes them, *bare* is the model alone. The
small model is 12 linear layers without gradients, the language model SmolLM2-135M-Instruct in {dtype}. The
patching methods are those of the NNsight paper's Table 1.
Made by `python -m benchmarks.tracing --repeats {0} --language-repeats {1}`."""
_SUMMARY: Final = "What a trace costs, beside PyTorch hooks written by hand."


def main() -> int:
    """Run the command line and return its exit status."""
    args = _arguments()
    console = Console()
    machine = announced_machine(console)
    torch.set_num_threads(1)
    try:
        rows = _measure(args, console)
    except BundledModelError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    repeats = (args.repeats, args.language_repeats)
    report = Report(machine, "tracing", _TITLE, _METHOD.format(*repeats, dtype=DTYPE_NAME), repeats, rows)
    console.print(report.table())
    if args.quick or args.only is not None:
        console.print("Not everything was measured in full: nothing was written.")
    else:
        console.print(f"Written to {report.write(args.output)}", soft_wrap=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=_SUMMARY)
    parser.add_argument("--only", choices=["small", "language"], help="one model, printed and not written")
    parser.add_argument("--repeats", type=int, default=60, help="repetitions of cases on the small model")
    parser.add_argument(
        "--language-repeats", type=int, default=7, help="repetitions of cases on the language model"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, printed and not written")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the tables")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.language_repeats = 10, 1
    if min(args.repeats, args.language_repeats) < 1:
        parser.error("repeats must be positive")
    return args


def _measure(args: argparse.Namespace, console: Console) -> list[Row]:
    cases = []
    if args.only != "language":
        small = small_cases((64, 512), (32,)) if args.quick else small_cases()
        cases += [(case, args.repeats) for case in small]
    if args.only != "small":
        cases += [(case, args.language_repeats) for case in language_cases()]
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Tracing", total=len(cases))
        for case, repeats in cases:
            progress.update(task, description=f"{case.name}, {case.size}")
            rows += measure(case, repeats)
            progress.advance(task)
    return rows


if __name__ == "__main__":
    sys.exit(main())
