"""The options that benchmarks of one table share, and what they do with the table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.table import Table

_RESULTS: Final = Path(__file__).parent / "results"


class Report(Protocol):
    """A run's results."""

    def table(self) -> Table:
        """Return the table for the terminal."""

    def write(self, folder: Path) -> Path:
        """Write the results, and return the file for people."""


def parser_of(program: str, description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of ``--repeats``, ``--quick`` and ``--output``."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--repeats", type=int, default=repeats, help="repetitions")
    parser.add_argument("--quick", action="store_true", help="few repetitions, printed and not written")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the tables")
    return parser


def parsed(parser: argparse.ArgumentParser, *, quick_repeats: int) -> argparse.Namespace:
    """Return the command line's options; a quick run has so many repetitions."""
    args = parser.parse_args()
    if args.quick:
        args.repeats = quick_repeats
    return args


def show(report: Report, console: Console, args: argparse.Namespace) -> None:
    """Print a table, and write it unless the run was a quick one."""
    console.print(report.table())
    if not args.quick:
        console.print(f"Written to {report.write(args.output)}", soft_wrap=True)


__all__ = ["parsed", "parser_of", "show"]
