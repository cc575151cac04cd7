"""How fast we are beside other packages that look into models, and beside hooks written by hand.

    python -m benchmarks.peers [--repeats 15] [--threads 2] [--environment PATH] [--without-peers] [--quick]

The first run installs the peers into a virtual environment of their own, 4 GB in the user's cache
directory. A peer that cannot be installed, or cannot do something, has a row that says why. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress

from benchmarks.command import parsed, parser_of, show
from benchmarks.machine import announced_machine
from benchmarks.peers.comparing import OURS, Row, compare
from benchmarks.peers.environment import (
    EnvironmentUnavailableError,
    default_environment,
    ensure_environment,
)
from benchmarks.peers.parent import SideError, SideProcess
from benchmarks.peers.report import Report
from benchmarks.peers.tasks import LOCAL_TASKS, NUM_THREADS
from nnsight_engine import BundledModelError, bundled_model_path

_PEERS: Final = ("nnsight", "interp-engine")
_HOOKS: Final = "PyTorch hooks"
_METHOD: Final = """\
{threads} threads. Every side runs in a process of its own, the peers with the same versions of torch and
transformers as we. Sides take turns, repetition by repetition; in each process the library takes turns, call
by call, with PyTorch hooks that do the same, registered and removed each time: the reference. A ratio is the
median over {repeats} repetitions of ours by its reference, divided by the peer's by its own; below 1, ours is
faster. Where what two sides read differs by more than rounding there is no ratio.
Made by `python -m benchmarks.peers --repeats {repeats} --threads {threads}`."""


def main() -> int:
    """Run the command line and return its exit status."""
    args = _arguments()
    console = Console()
    machine = announced_machine(console)
    try:
        model = bundled_model_path()
    except BundledModelError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    missing: dict[str, str] = {}
    python = None if args.without_peers else _environment(args.environment, missing, console)
    with _sides(python, model, args.threads, missing) as (sides, folder):
        rows = _measure(sides, folder, missing, args.repeats, console)
        versions = {name: version for side in sides[1:] for name, version in side.versions.items()}
    machine = dataclasses.replace(machine, versions={**versions, **machine.versions})
    method = _METHOD.format(repeats=args.repeats, threads=args.threads)
    show(Report(machine, method, args.repeats, rows), console, args)
    return 0


def _arguments() -> argparse.Namespace:
    parser = parser_of("benchmarks.peers", "Our speed beside peers, through their public API.", repeats=15)
    parser.add_argument("--threads", type=int, default=NUM_THREADS, help="of torch, in each side")
    parser.add_argument(
        "--environment", type=Path, default=default_environment(), help="the peers' virtual environment"
    )
    parser.add_argument("--without-peers", action="store_true", help="hooks only; nothing is installed")
    args = parsed(parser, quick_repeats=3)
    if min(args.repeats, args.threads) < 1:
        parser.error("repeats and threads must be positive")
    return args


def _environment(folder: Path, missing: dict[str, str], console: Console) -> Path | None:
    """Return the peers' python, or note for each of them why there is none."""
    try:
        with console.status(f"The peers' environment in {folder}"):
            return ensure_environment(folder)
    except EnvironmentUnavailableError as error:
        missing.update(dict.fromkeys(_PEERS, f"cannot be installed here: {error}"))
        return None


@contextlib.contextmanager
def _sides(
    python: Path | None, model: Path, threads: int, missing: dict[str, str]
) -> Iterator[tuple[list[SideProcess], Path]]:
    """Give the sides that have started, ours first, and the folder for what they read."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = ["--model", str(model), "--folder", str(folder), "--threads", str(threads)]
        sides = []
        pythons = {OURS: Path(sys.executable), **({} if python is None else dict.fromkeys(_PEERS, python))}
        for name, interpreter in pythons.items():
            side = stack.enter_context(SideProcess(name, interpreter, arguments, {"HF_HUB_OFFLINE": "1"}))
            try:
                side.wait()
            except SideError as error:
                if name == OURS:
                    raise
                missing[name] = f"does not run here: {error}"
            else:
                sides.append(side)
        yield sides, folder


def _measure(
    sides: list[SideProcess], folder: Path, missing: dict[str, str], repeats: int, console: Console
) -> list[Row]:
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task("Peers", total=len(LOCAL_TASKS))
        for number, task in enumerate(LOCAL_TASKS):
            progress.update(shown, description=f"{task.name}, {task.size.name}")
            found = compare(number, task, sides, folder, reference=_HOOKS, repeats=repeats)
            rows += found
            rows += [Row(task, peer, found[0].ours, None, reason) for peer, reason in missing.items()]
            progress.advance(shown)
    return rows


if __name__ == "__main__":
    sys.exit(main())
