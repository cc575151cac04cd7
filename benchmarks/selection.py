"""Which cases a run measures: options that the command and the process that it starts share.

A whole run takes a while; with these options it is cut into runs of some minutes, and ``--add`` makes one
table of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from benchmarks.cases import TURN_STEPS, Case, Quantity, all_cases

_BATCHES: Final = (1, 8, 32, 64)
_PROMPTS: Final = (16, 512)
_QUICK_REPEATS: Final = 2
_QUICK_STEPS: Final = 2 * TURN_STEPS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which cases are chosen, and how often and how long they run."""
    parser.add_argument(
        "--batches", type=int, nargs="+", default=list(_BATCHES), help="requests that run together"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=list(_PROMPTS), help="tokens of the prompts"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORDS", help="cases with this in their name"
    )
    parser.add_argument("--quantity", choices=list(Quantity), help="either throughput or time to first token")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of every case in each process")
    parser.add_argument(
        "--steps", type=int, default=48, help=f"timed decode steps, a multiple of {TURN_STEPS}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 repetitions of 16 steps in one process, printed and not written",
    )


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Case]:
    """Return the chosen cases; end the program where the options make no sense."""
    if args.quick:
        args.repeats, args.steps = _QUICK_REPEATS, _QUICK_STEPS
    if min(args.repeats, args.steps, *args.batches, *args.prompts) < 1 or args.steps % TURN_STEPS:
        parser.error(f"numbers must be positive and steps a multiple of {TURN_STEPS}")
    cases = chosen(args.batches, args.prompts, args.only, args.quantity)
    if not cases:
        parser.error(f"no case has {' or '.join(args.only)} in its name")
    return cases


def chosen(
    batches: Sequence[int], prompts: Sequence[int], words: Sequence[str], quantity: str | None
) -> list[Case]:
    """Return the cases with one of the words in their names, all where there are no words."""
    return [
        case
        for case in all_cases(batches, prompts)
        if (not words or any(word in case.variant.name for word in words))
        and quantity in (None, case.variant.quantity)
    ]


def as_options(args: argparse.Namespace) -> list[str]:
    """Return the command line that makes the same choice."""
    options = ["--batches", *map(str, args.batches), "--prompts", *map(str, args.prompts)]
    if args.only:
        options += ["--only", *args.only]
    if args.quantity:
        options += ["--quantity", args.quantity]
    return [*options, "--repeats", str(args.repeats), "--steps", str(args.steps)]


__all__ = ["add_options", "as_options", "check_options", "chosen"]
