"""The tables: on the terminal, and as markdown and JSON in ``benchmarks/results/``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from benchmarks.cases import Quantity
from benchmarks.files import bound_lines, table_lines, write_report
from benchmarks.machine import Machine, machine_lines
from benchmarks.precision import DTYPE_NAME
from benchmarks.ratios import Row

_COLUMNS = (
    "case",
    "requests",
    "prompt",
    "ratio",
    "processes",
    "quartiles",
    "target",
    "reached",
    "ours",
    "plain",
)

_TITLES = {
    Quantity.DECODE: "Decode throughput, ours / plain vLLM",
    Quantity.FIRST_TOKEN: "Time to first token, ours / plain vLLM",
}


class ReportError(Exception):
    """Two runs that cannot be one table."""


def name_of(machine: Machine, mode: str) -> str:
    """Return the name of a table's files."""
    return f"{machine.date}-{mode}"


def check_addable(folder: Path, mode: str, machine: Machine) -> None:
    """Raise ReportError where a run on this machine could not be added to the day's table, if any."""
    _alike(folder, name_of(machine, mode), machine)


def _alike(folder: Path, name: str, machine: Machine) -> dict[str, Any] | None:
    """Return what a table's file has, None where there is none."""
    file = (folder / name).with_suffix(".json")
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    before = msgspec.convert(content["machine"], Machine)
    if not before.is_alike(machine):
        raise ReportError(
            f"a table has results of one commit on one machine, {file.name} is of {before.commit} on "
            f"{before.cpu} and these would be of {machine.commit} on {machine.cpu}; leave --add out"
        )
    return content


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One mode's results.

    Attributes:
        mode: ``eager`` or ``compiled``.
        machine: Where they were measured.
        commands: The command lines that made them.
        rows: The results, in any order.
    """

    mode: str
    machine: Machine
    commands: Sequence[str]
    rows: Sequence[Row]

    @property
    def name(self) -> str:
        """The files' name."""
        return name_of(self.machine, self.mode)

    def added_to(self, folder: Path) -> Report:
        """Return the day's table with these results in it; this one where there is none yet.

        Raises:
            ReportError: The table is of another commit or machine.
        """
        content = _alike(folder, self.name, self.machine)
        if content is None:
            return self
        before = msgspec.convert(content["machine"], Machine)
        places = {row.place for row in self.rows}
        kept = [row for row in msgspec.convert(content["rows"], list[Row]) if row.place not in places]
        busier = max(before, self.machine, key=lambda machine: machine.load)
        return Report(self.mode, busier, [*content["commands"], *self.commands], [*kept, *self.rows])

    def tables(self) -> list[Table]:
        """Return one table per quantity for the terminal."""
        tables = []
        for quantity, title in _TITLES.items():
            table = Table(title=f"{title}, {self.mode}")
            for place, column in enumerate(_COLUMNS):
                table.add_column(column, justify="left" if place == 0 else "right")
            for row in self._of(quantity):
                table.add_row(*_cells(row), style="red" if row.reached is False else "")
            if table.row_count:
                tables.append(table)
        return tables

    def write(self, folder: Path) -> Path:
        """Write ``<date>-<mode>.md`` and ``.json``, and return the markdown file."""
        return write_report(folder, self.name, markdown=self.to_markdown(), json=self.to_json())

    def to_markdown(self) -> str:
        """Return the report as markdown."""
        lines = [
            *machine_lines(self.machine, f"Against plain vLLM, {self.mode}"),
            "",
            f"SmolLM2-135M-Instruct in {DTYPE_NAME}. Both engines live in one process with the same "
            "arguments and take strict turns.",
            "A ratio is the median over processes of each one's median of paired ratios; beside it are the",
            "lowest and the highest process, and the quartiles of all repetitions. The control's distance",
            "from 1 is the error of the measurement. "
            f"{_spread(row.num_processes for row in self.rows)} processes, "
            f"{_spread(row.num_repeats for row in self.rows)} repetitions in each, "
            f"{_spread(row.num_steps for row in self.rows)} timed decode steps each, made by",
            "",
            *(f"    {command}" for command in self.commands),
        ]
        for quantity, title in _TITLES.items():
            if rows := self._of(quantity):
                head = [*_COLUMNS[:-2], f"ours, {quantity.unit}", f"plain, {quantity.unit}"]
                lines += ["", f"## {title}", "", *table_lines(head, map(_cells, rows))]
        return "\n".join([*lines, *self._bounds()]) + "\n"

    def _bounds(self) -> list[str]:
        """Return what bounds the cases that miss their targets."""
        return bound_lines({row.name: row.bound for row in self.rows if row.reached is False})

    def to_json(self) -> str:
        """Return the report as JSON."""
        rows = [dataclasses.asdict(row) for quantity in _TITLES for row in self._of(quantity)]
        content = {
            "mode": self.mode,
            "commands": list(self.commands),
            "machine": dataclasses.asdict(self.machine),
            "rows": rows,
        }
        return json.dumps(content, indent=1) + "\n"

    def _of(self, quantity: Quantity) -> list[Row]:
        return sorted((row for row in self.rows if row.quantity == quantity), key=lambda row: row.place)


def _spread(numbers: Iterable[int]) -> str:
    different = sorted(set(numbers))
    return str(different[0]) if len(different) == 1 else f"{different[0]} to {different[-1]}"


def _cells(row: Row) -> list[str]:
    sign = "≥" if row.quantity == Quantity.DECODE else "≤"
    return [
        row.name,
        str(row.num_requests),
        str(row.prompt_tokens),
        f"{row.ratio:.3f}",
        f"{row.processes[0]:.3f} – {row.processes[1]:.3f}",
        f"{row.quartiles[0]:.3f} – {row.quartiles[1]:.3f}",
        "" if row.target is None else f"{sign} {row.target:g}",
        {True: "yes", False: "no", None: ""}[row.reached],
        f"{row.ours:.1f}",
        f"{row.plain:.1f}",
    ]
