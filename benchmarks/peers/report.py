"""The table: ratios first, then what each side took, and whether they did the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.files import table_lines, write_report
from benchmarks.machine import Machine, machine_lines
from benchmarks.peers.comparing import Row, Times

_TITLE = "Beside peers"
_COLUMNS = (
    "task",
    "on",
    "peer",
    "ours / peer",
    "quartiles",
    "ours over reference, µs",
    "peer over reference, µs",
    "ours, µs",
    "peer, µs",
    "what they read agrees",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One run's results.

    Attributes:
        machine: Where they were measured, with the peers' versions.
        name: The files' name, behind the date.
        method: How, in a few lines, and the command.
        repeats: Repetitions of each task.
        rows: The results.
    """

    machine: Machine
    name: str
    method: str
    repeats: int
    rows: Sequence[Row]

    def table(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=_TITLE)
        for place, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if place == 0 else "right")
        for row in self.rows:
            table.add_row(*_cells(row))
        return table

    def write(self, folder: Path) -> Path:
        """Write ``<date>-<name>.md`` and ``.json``, and return the markdown file."""
        name = f"{self.machine.date}-{self.name}"
        return write_report(folder, name, markdown=self.to_markdown(), json=self.to_json())

    def to_markdown(self) -> str:
        """Return the report as markdown."""
        table = table_lines(_COLUMNS, map(_cells, self.rows))
        return "\n".join([*machine_lines(self.machine, _TITLE), "", self.method, "", *table]) + "\n"

    def to_json(self) -> str:
        """Return the report as JSON."""
        rows = [_content(row) for row in self.rows]
        content = {"machine": dataclasses.asdict(self.machine), "repeats": self.repeats, "rows": rows}
        return json.dumps(content, indent=1) + "\n"


def _content(row: Row) -> dict[str, Any]:
    ratios = row.ratios
    return {
        "task": row.task.name,
        "on": row.task.size.name,
        "peer": row.peer,
        "ratio": None if ratios is None else float(np.median(ratios)),
        "quartiles": None if ratios is None else np.quantile(ratios, [0.25, 0.75]).tolist(),
        "ours": row.ours,
        "theirs": row.theirs,
        "agreement": row.agreement,
    }


def _cells(row: Row) -> list[str]:
    ratios = row.ratios
    low, middle, high = ("", "", "") if ratios is None else _formatted(ratios)
    return [
        row.task.name,
        row.task.size.name,
        row.peer,
        middle,
        f"{low} – {high}" if ratios is not None else "",
        _over(row.ours),
        _over(row.theirs),
        _median(row.ours),
        _median(row.theirs),
        row.agreement.replace("|", "/"),
    ]


def _formatted(ratios: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{ratio:.3f}" for ratio in np.quantile(ratios, [0.25, 0.5, 0.75]))


def _over(times: Times | None) -> str:
    if times is None:
        return ""
    return f"{1e6 * float(np.median(np.subtract(times['library'], times['reference']))):.1f}"


def _median(times: Times | None) -> str:
    return "" if times is None else f"{1e6 * float(np.median(times['library'])):.0f}"
