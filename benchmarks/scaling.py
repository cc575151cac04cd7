"""How the cost of intervening grows with requests, layers, generated tokens and saved bytes.

    python -m benchmarks.scaling [--mode eager|compiled] [--only WORDS …] [--repeats 5] [--quick]

For plans and for traces. Whole requests with interventions against the same without, on one engine by turns.
``--only requests`` measures some curves, into a table of their own. Run it on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import parsed, parser_of, show
from benchmarks.files import bound_lines, table_lines, write_report
from benchmarks.growth import MOST_LINEAR, Cost, Growth, cost_of, growths, slope
from benchmarks.machine import Machine, announced_machine, machine_lines
from benchmarks.precision import DTYPE_NAME
from benchmarks.processes import HUGE_PAGES, ChildError, run_child
from nnsight_engine.modeling.bundled import bundled_model_path

_COLUMNS = (
    "case",
    "grows with",
    "from size to size",
    "cost, ms",
    "with / without",
    "slope",
    "linear or better",
)

_METHOD = """\
SmolLM2-135M-Instruct in {dtype}, {mode}, one engine, in one process. Requests run whole, by turns without
interventions and with them; what they take more is the cost, a median over {repeats} repetitions. The slope
is that of a straight line through the logarithms of sizes and costs, over sizes whose cost stands out of the
noise (the others in brackets): 1 is linear growth, and up to {linear} counts as such.
Made by `{command}`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """What a growth came to."""

    growth: Growth
    costs: Sequence[Cost]

    @property
    def slope(self) -> float | None:
        """By which power costs grow; None where they hardly stand out of the noise."""
        return slope(self.costs)

    @property
    def is_linear(self) -> bool | None:
        """Whether they grow as the size does, or less; None where that cannot be told."""
        return None if self.slope is None else self.slope <= MOST_LINEAR

    def cells(self) -> list[str]:
        """Return the curve's row of the table."""
        return [
            self.growth.name,
            self.growth.axis,
            ", ".join(f"{cost.size}" for cost in self.costs),
            ", ".join(
                f"{1e3 * cost.cost_s:.1f}" if cost.is_clear else f"({1e3 * cost.cost_s:.1f})"
                for cost in self.costs
            ),
            ", ".join(f"{cost.ratio:.3f}" for cost in self.costs),
            "" if self.slope is None else f"{self.slope:.2f}",
            {True: "yes", False: "no", None: "within the noise"}[self.is_linear],
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One run's results."""

    machine: Machine
    mode: str
    num_repeats: int
    only: Sequence[str]
    curves: Sequence[Curve]

    def table(self) -> Table:
        """Return the table for the terminal."""
        table = Table(*_COLUMNS, title=f"What growing costs, {self.mode}")
        for curve in self.curves:
            table.add_row(*curve.cells(), style="red" if curve.is_linear is False else "")
        return table

    def write(self, folder: Path) -> Path:
        """Write ``<date>-scaling-<mode>[-<words>].md`` and ``.json``, and return the markdown file."""
        words = "-".join(re.findall(r"\w+", " ".join(self.only)))
        name = f"{self.machine.date}-scaling-{self.mode}" + (f"-{words}" if words else "")
        return write_report(folder, name, markdown=self._markdown(), json=self._json())

    def _markdown(self) -> str:
        options = ["--mode", self.mode, "--repeats", str(self.num_repeats)]
        options += ["--only", *self.only] if self.only else []
        command = f"python -m benchmarks.scaling {shlex.join(options)}"
        method = _METHOD.format(
            mode=self.mode, repeats=self.num_repeats, linear=MOST_LINEAR, command=command, dtype=DTYPE_NAME
        )
        lines = machine_lines(self.machine, f"What growing costs, {self.mode}")
        lines += ["", method, "", *table_lines(_COLUMNS, [curve.cells() for curve in self.curves])]
        missed = (curve.growth for curve in self.curves if curve.is_linear is False)
        lines += bound_lines({f"{one.name}, by {one.axis}": one.bound for one in missed})
        return "\n".join(lines) + "\n"

    def _json(self) -> str:
        rows = [
            {
                "case": curve.growth.name,
                "axis": curve.growth.axis,
                "slope": curve.slope,
                "linear": curve.is_linear,
                "costs": [dataclasses.asdict(cost) for cost in curve.costs],
            }
            for curve in self.curves
        ]
        content = {
            "mode": self.mode,
            "machine": dataclasses.asdict(self.machine),
            "repeats": self.num_repeats,
        }
        return json.dumps(content | {"rows": rows}, indent=1) + "\n"


def main() -> int:
    """Measure, print, and return the exit status."""
    args, chosen = _arguments()
    console = Console()
    machine = announced_machine(console)
    bundled_model_path()
    try:
        curves = _measured(args, chosen, console)
    except ChildError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    show(Report(machine, args.mode, args.repeats, args.only, curves), console, args)
    return 0


def _arguments() -> tuple[argparse.Namespace, list[int]]:
    parser = parser_of("benchmarks.scaling", __doc__, repeats=5)
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORDS", help="curves with this in their name or axis"
    )
    args = parsed(parser, quick_repeats=1)
    chosen = [
        number
        for number, growth in enumerate(growths())
        if not args.only or any(word in f"{growth.name}, {growth.axis}" for word in args.only)
    ]
    if not chosen:
        parser.error(f"no curve has {' or '.join(args.only)} in its name")
    return args, chosen


def _measured(args: argparse.Namespace, chosen: list[int], console: Console) -> list[Curve]:
    idle: dict[tuple[int, int], list[float]] = defaultdict(list)
    ours: dict[tuple[int, int], list[float]] = defaultdict(list)
    options = ["--mode", args.mode, "--repeats", str(args.repeats), "--curves", *map(str, chosen)]
    every = growths()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(args.mode, total=args.repeats * sum(len(every[n].points) for n in chosen))
        for event in run_child("benchmarks.scaling_worker", options, HUGE_PAGES):
            if "stage" in event:
                progress.update(task, description=f"{args.mode}: {event['stage']}")
                continue
            place = event["curve"], event["size"]
            idle[place].append(event["idle"])
            ours[place].append(event["ours"])
            progress.update(task, advance=1, description=f"{args.mode}: {every[event['curve']].name}")
    return [
        Curve(
            every[number],
            [
                cost_of(point.size, idle[number, point.size], ours[number, point.size])
                for point in every[number].points
            ],
        )
        for number in chosen
    ]


if __name__ == "__main__":
    sys.exit(main())
