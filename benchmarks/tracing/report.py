"""The table: on the terminal, and as markdown and JSON in ``benchmarks/results/``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.files import table_lines, write_report
from benchmarks.machine import Machine, machine_lines
from benchmarks.tracing.timing import Row

_COLUMNS = ("case", "size", "measure", "median", "quartiles", "worst", "target", "reached", "times, µs")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One run's results.

    Attributes:
        machine: Where they were measured.
        name: The files' name, behind the date.
        title: What was compared.
        method: How, in a few lines, and the command.
        repeats: Repetitions of each case; one number for each kind of case.
        rows: The results.
    """

    machine: Machine
    name: str
    title: str
    method: str
    repeats: Sequence[int]
    rows: Sequence[Row]

    def table(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=self.title)
        for place, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if place == 0 else "right")
        for row in self.rows:
            table.add_row(*_cells(row), style="red" if row.reached is False else "")
        return table

    def write(self, folder: Path) -> Path:
        """Write ``<date>-tracing.md`` and ``.json``, and return the markdown file."""
        name = f"{self.machine.date}-{self.name}"
        return write_report(folder, name, markdown=self.to_markdown(), json=self.to_json())

    def to_markdown(self) -> str:
        """Return the report as markdown."""
        lines = [
            *machine_lines(self.machine, self.title),
            "",
            self.method,
            "",
            *table_lines(_COLUMNS, map(_cells, self.rows)),
        ]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Return the report as JSON."""
        rows = [
            {
                "case": row.case.name,
                "size": row.case.size,
                "measure": row.measure.name,
                "median": row.value,
                "quartiles": row.quartiles,
                "worst": row.worst,
                "target": row.measure.target,
                "reached": row.reached,
                "seconds": row.medians,
            }
            for row in self.rows
        ]
        content = {"machine": dataclasses.asdict(self.machine), "repeats": self.repeats, "rows": rows}
        return json.dumps(content, indent=1) + "\n"


def _cells(row: Row) -> list[str]:
    measure = row.measure
    low, high = row.quartiles
    digits = 1 if measure.name.endswith("µs") else 3
    return [
        row.case.name,
        row.case.size,
        measure.name,
        f"{row.value:.{digits}f}",
        f"{low:.{digits}f} – {high:.{digits}f}",
        f"{row.worst:.{digits}f}",
        "" if measure.target is None else f"≤ {measure.target:g}",
        {True: "yes", False: "no", None: ""}[row.reached],
        ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in row.medians.items()),
    ]
