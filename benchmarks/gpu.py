"""What interventions cost on a GPU: traces, plans, and the serving table where vLLM runs there.

    python -m benchmarks.gpu [--device cuda|cpu] [--repeats 30] [--mode eager|compiled|both] [--no-serving]
        [--quick]

Needs this repository and installed packages, and no network. Traces run on a stack of small layers, plans on
a stand-in for a model, both with the installed torch; that no step waits for the GPU is checked first. The
serving table needs vLLM for that GPU, and the bundled model. ``--device cpu`` runs the first two without one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import subprocess
import sys
from typing import Final

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.command import parsed, parser_of, show
from benchmarks.machine import announced_machine
from benchmarks.plan_kernels import plan_cases
from benchmarks.tracing.report import Report
from benchmarks.tracing.small import small_cases
from benchmarks.tracing.timing import Case, Row, Sampler, measure

_BATCHES: Final = (1, 8, 64)
_QUICK_CASES: Final = 3
_PROBE: Final = "from vllm.platforms import current_platform as own; print('cuda:', own.is_cuda())"
_METHOD: Final = """\
On {device}. Sides take turns, and each call ends when the device has done what it asked for. Traces: *ours*
is a trace, *hooks* registers PyTorch hooks, runs and removes them, *bare* is the model alone. Plans: *ours*
is a step with its plan and the harvest of its results, *plain* the step alone; that no step waits for the
device before its results are taken was checked. A figure is the median over {repeats} repetitions. Python
has one thread.
Made by `python -m benchmarks.gpu --device {device} --repeats {repeats}`."""


def main() -> int:
    """Run the command line and return its exit status."""
    args = _arguments()
    console = Console()
    if args.device == "cuda" and not torch.cuda.is_available():
        console.print(
            f"benchmarks: torch {torch.__version__} finds no CUDA GPU here. Run this where there is one, "
            "with a torch built for it; --device cpu tries traces and plans without one.",
            markup=False,
            soft_wrap=True,
        )
        return 1
    machine = announced_machine(console)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    rows = _measured(_cases(device, is_quick=args.quick), args.repeats, console)
    method = _METHOD.format(device=device, repeats=args.repeats)
    title = f"Traces and plans on {device.type}"
    show(Report(machine, f"device-{device.type}", title, method, [args.repeats], rows), console, args)
    if args.no_serving or device.type == "cpu":
        return 0
    return _serve(args, console)


def _arguments() -> argparse.Namespace:
    parser = parser_of("benchmarks.gpu", __doc__, repeats=30)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mode", choices=["eager", "compiled", "both"], default="both", help="of serving")
    parser.add_argument("--no-serving", action="store_true", help="without the serving table")
    return parsed(parser, quick_repeats=2)


def _cases(device: torch.device, *, is_quick: bool) -> list[Case]:
    small = small_cases((64,), ())[:_QUICK_CASES] if is_quick else small_cases()
    plans = plan_cases(device, (8,) if is_quick else _BATCHES)
    return [*(_placed(case, device) for case in small), *plans]


def _placed(case: Case, device: torch.device) -> Case:
    """Return a case whose model and inputs are made on a device."""

    def make() -> Sampler:
        with torch.device(device):
            return case.make()

    return dataclasses.replace(case, size=f"{case.size}, {device.type}", make=make)


def _measured(cases: list[Case], repeats: int, console: Console) -> list[Row]:
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.name}, {case.size}")
            rows += measure(case, repeats)
            progress.advance(task)
    return rows


def _serve(args: argparse.Namespace, console: Console) -> int:
    """Measure the serving table in a process of its own, or say why it is left out."""
    if importlib.util.find_spec("vllm") is None:
        console.print("No serving table: vLLM is not installed here.")
        return 0
    asked = [sys.executable, "-c", _PROBE]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if "cuda: True" not in found.stdout:
        reason = found.stderr.strip().splitlines()[-1:] or ["it is not built for CUDA"]
        console.print(f"No serving table: vLLM does not run on this GPU: {reason[0]}", markup=False)
        return 0
    options = ["--mode", args.mode, "--output", str(args.output), *(["--quick"] if args.quick else [])]
    return subprocess.run([sys.executable, "-m", "benchmarks", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
