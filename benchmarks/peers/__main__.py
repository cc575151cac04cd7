"""How fast we are beside other packages that look into models, and beside hooks written by hand.

    python -m benchmarks.peers [--only local|serving] [--repeats 15] [--threads 2] [--without-peers] [--quick]

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
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

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
from benchmarks.peers.tasks import LOCAL_TASKS, NUM_THREADS, SERVING_TASKS, Task
from benchmarks.precision import DTYPE_NAME
from benchmarks.processes import ENVIRONMENT
from nnsight_engine import BundledModelError, bundled_model_path

_PEERS: Final = ("nnsight", "interp-engine")
_METHOD: Final = """\
{threads} threads. Every side runs in a process of its own, the peers with the same versions of torch and
transformers as we. Sides take turns, repetition by repetition; in each process the library takes turns,
call by call, with PyTorch hooks that do the same, registered and removed each time: the reference. A ratio
is the median over {repeats} repetitions of our time by the peer's; below 1, ours is faster. *Over
reference* is what a side adds to the reference in its own process. Where what two sides read differs by
more than rounding there is no ratio.
*MLP* is 12 linear layers of width 64 in float32, *SmolLM2* SmolLM2-135M-Instruct in {dtype} with a prompt of
12 tokens. In vLLM, uncompiled and on all cores, the reference is plain vLLM in a process of its own, which
generates as many tokens and looks into nothing.
Made by `python -m benchmarks.peers --repeats {repeats} --threads {threads}`."""


class _Part(NamedTuple):
    """Tasks that the same processes do.

    Attributes:
        name: ``local`` or ``serving``.
        tasks: What is done.
        reference: What every side is measured against.
        own: Sides that run in our environment.
        variables: Environment variables of all sides.
    """

    name: str
    tasks: tuple[Task, ...]
    reference: str
    own: tuple[str, ...]
    variables: Mapping[str, str]


_PARTS: Final = (
    _Part("local", LOCAL_TASKS, "PyTorch hooks", (OURS,), {"HF_HUB_OFFLINE": "1"}),
    _Part(
        "serving",
        SERVING_TASKS,
        "plain vLLM",
        (OURS, "plain vLLM"),
        # As vLLM comes, its engine has a process of its own; interp-engine knows no other way.
        {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ),
)


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
    python: Path | None = None
    missing: dict[str, str] = {}
    if not args.without_peers:
        python, missing = _environment(args.environment, console)
    run = _Run(python, model, args.threads, args.repeats, console)
    parts = [part for part in _PARTS if args.only in {None, part.name}]
    try:
        rows = [row for part in parts for row in run.rows(part, dict(missing))]
    except SideError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    machine = dataclasses.replace(machine, versions={**run.versions, **machine.versions})
    method = _METHOD.format(repeats=args.repeats, threads=args.threads, dtype=DTYPE_NAME)
    if args.only is not None:
        method = method.removesuffix("`.") + f" --only {args.only}`."
    name = "peers" if args.only is None else f"peers-{args.only}"
    show(Report(machine, name, method, args.repeats, rows), console, args)
    return 0


def _arguments() -> argparse.Namespace:
    parser = parser_of("benchmarks.peers", "Our speed beside peers, through their public API.", repeats=15)
    parser.add_argument(
        "--only", choices=[part.name for part in _PARTS], help="one half, written to a file of its own"
    )
    parser.add_argument("--threads", type=int, default=NUM_THREADS, help="of torch, in each side")
    parser.add_argument(
        "--environment", type=Path, default=default_environment(), help="the peers' virtual environment"
    )
    parser.add_argument("--without-peers", action="store_true", help="hooks only; nothing is installed")
    args = parsed(parser, quick_repeats=3)
    if min(args.repeats, args.threads) < 1:
        parser.error("repeats and threads must be positive")
    return args


def _environment(folder: Path, console: Console) -> tuple[Path | None, dict[str, str]]:
    """Return the peers' python, or for each of them why there is none."""
    try:
        with console.status(f"The peers' environment in {folder}"):
            return ensure_environment(folder), {}
    except EnvironmentUnavailableError as error:
        return None, dict.fromkeys(_PEERS, f"cannot be installed here: {error}")


@dataclasses.dataclass(slots=True)
class _Run:
    """One run of the command."""

    python: Path | None
    model: Path
    threads: int
    repeats: int
    console: Console
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def rows(self, part: _Part, missing: dict[str, str]) -> list[Row]:
        """Measure a part; ``missing`` says which peers have been given up already, and why."""
        rows: list[Row] = []
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            progress = stack.enter_context(Progress(console=self.console, transient=True))
            shown = progress.add_task(f"Starting, {part.name}", total=len(part.tasks))
            sides = self._sides(part, folder, missing, stack)
            for number, task in enumerate(part.tasks):
                progress.update(shown, description=f"{task.name}, {task.size.name}")
                rows += compare(number, task, sides, folder, reference=part.reference, repeats=self.repeats)
                progress.advance(shown)
        everything = Task("", "everything", part.tasks[-1].size)
        return rows + [Row(everything, peer, None, None, reason) for peer, reason in missing.items()]

    def _sides(
        self, part: _Part, folder: Path, missing: dict[str, str], stack: contextlib.ExitStack
    ) -> list[SideProcess]:
        """Return the sides that have started, ours first; the others are noted as missing."""
        arguments = ["--model", str(self.model), "--folder", str(folder), "--threads", str(self.threads)]
        pythons = dict.fromkeys(part.own, Path(sys.executable))
        if self.python is not None:
            pythons |= dict.fromkeys(_PEERS, self.python)
        sides = []
        for name, python in pythons.items():
            try:
                side = stack.enter_context(SideProcess(part.name, name, python, arguments, part.variables))
                side.wait()
            except SideError as error:
                if name in part.own:
                    raise SideError(f"{name}: {error}") from error
                missing[name] = f"does not run here: {error}"
            else:
                sides.append(side)
                self.versions |= side.versions
        return sides


if __name__ == "__main__":
    sys.exit(main())
