"""From samples to a table: on the terminal, and as markdown and JSON in ``benchmarks/results/``."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.case import SCALES
from benchmarks.files import table_lines, write_report
from benchmarks.machine import Machine, machine_lines
from benchmarks.process import Event

_COLUMNS: Final = (
    "case", "size", "measure", "median", "quartiles", "worst", "processes", "target", "reached", "sides",
)  # fmt: skip


class ReportError(Exception):
    """Two runs cannot be one table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One measure of one case.

    Attributes:
        value: The median over processes of their medians over repetitions; None where it was not measured.
        quartiles: First and third quartile of all repetitions.
        worst: The worst repetition.
        processes: The lowest and the highest process's median. Where memory happens to lie, one process's
            engines differ from another's by several percent, which no number of repetitions shows.
        reached: Whether the value keeps the target, None where there is none.
        note: Why it was not measured.
        sides: Median of each side, in ``unit``.
    """

    case: str
    size: str
    measure: str
    value: float | None
    quartiles: tuple[float, float] | None
    worst: float | None
    processes: tuple[float, float] | None
    target: float | None
    is_floor: bool
    reached: bool | None
    bound: str
    note: str
    unit: str
    sides: dict[str, float]
    num_repeats: int
    num_processes: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What it answers: a later row with the same key replaces it."""
        return self.case, self.size, self.measure


class Results:
    """Collects the events of a table's processes."""

    def __init__(self) -> None:
        """Start empty."""
        self.plan: Event = {}
        self._notes: dict[int, str] = {}
        self._overall: dict[int, list[float | None]] = {}
        self._samples: dict[int, list[dict[str, float]]] = defaultdict(list)
        self._values: dict[int, list[list[list[float | None]]]] = defaultdict(list)
        """By case: by process: one list of values for each repetition."""

    def add(self, event: Event) -> None:
        """Record an event."""
        if "plan" in event:
            self.plan = self.plan or event["plan"]
            for number, _ in enumerate(self.plan["cases"]):
                self._values[number].append([])
        elif "note" in event:
            self._notes[event["case"]] = event["note"]
        elif "overall" in event:
            self._overall[event["case"]] = event["overall"]
        else:
            self._samples[event["case"]].append(event["sample"])
            self._values[event["case"]][-1].append(event["values"])

    def rows(self) -> list[Row]:
        """Return the table's rows."""
        return [
            self._row(number, place)
            for number, case in enumerate(self.plan["cases"])
            for place, _ in enumerate(case["measures"])
        ]

    def _row(self, number: int, place: int) -> Row:
        case = self.plan["cases"][number]
        measure = case["measures"][place]
        by_process = [[values[place] for values in one] for one in self._values[number] if one]
        flat = [value for values in by_process for value in values if value is not None]
        medians = [float(np.median(values)) for values in by_process] if flat else []  # type: ignore[arg-type] # no None then
        overall = self._overall[number][place] if number in self._overall else None
        value = float(np.median(medians)) if medians else overall
        worst = (min if measure["is_floor"] else max)(flat) if flat else None
        return Row(
            case=case["name"],
            size=case["size"],
            measure=measure["name"],
            value=value,
            quartiles=_quartiles(flat) if flat else None,
            worst=worst,
            processes=(min(medians), max(medians)) if len(medians) > 1 else None,
            target=measure["target"],
            is_floor=measure["is_floor"],
            reached=_reached(value, measure),
            bound=measure["bound"],
            note=self._notes.get(number, ""),
            unit=case["unit"],
            sides=_sides(self._samples[number], SCALES.get(case["unit"], 1.0)),
            num_repeats=max((len(values) for values in by_process), default=0),
            num_processes=len(by_process),
        )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.25, 0.75]).tolist()
    return low, high


def _reached(value: float | None, measure: Event) -> bool | None:
    target = measure["target"]
    if target is None or value is None:
        return None
    return bool(value >= target if measure["is_floor"] else value <= target)


def _sides(samples: Sequence[dict[str, float]], scale: float) -> dict[str, float]:
    names = samples[0] if samples else ()
    return {name: scale * float(np.median([sample[name] for sample in samples])) for name in names}


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One table.

    Attributes:
        machine: Where it was measured.
        name: Of the files, behind the date.
        commands: The command lines that made it.
    """

    machine: Machine
    name: str
    title: str
    method: str
    commands: Sequence[str]
    rows: Sequence[Row]

    @property
    def _stem(self) -> str:
        return f"{self.machine.date}-{self.name}"

    def added_to(self, folder: Path) -> Report:
        """Return the day's table with these rows in it; this one where there is none yet.

        Raises:
            ReportError: The table is of another commit or machine.
        """
        file = folder / f"{self._stem}.json"
        if not file.exists():
            return self
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        before = msgspec.convert(content["machine"], Machine)
        if not before.is_alike(self.machine):
            raise ReportError(
                f"a table has results of one commit on one machine, {file.name} is of {before.commit} on "
                f"{before.cpu} and these would be of {self.machine.commit} on {self.machine.cpu}; "
                "leave --add out"
            )
        keys = {row.key for row in self.rows}
        kept = [row for row in msgspec.convert(content["rows"], list[Row]) if row.key not in keys]
        busier = max(before, self.machine, key=lambda machine: machine.load)
        commands = [*content["commands"], *self.commands]
        return dataclasses.replace(self, machine=busier, commands=commands, rows=[*kept, *self.rows])

    def table(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=self.title)
        for place, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if place == 0 else "right")
        for row, cells in zip(self.rows, self._cells(), strict=True):
            table.add_row(*cells, style="red" if row.reached is False else "")
        return table

    def write(self, folder: Path) -> Path:
        """Write ``<date>-<name>.md`` and ``.json``, and return the markdown file."""
        content = {
            "machine": dataclasses.asdict(self.machine),
            "commands": list(self.commands),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        text = json.dumps(content, indent=1) + "\n"
        return write_report(folder, self._stem, markdown=self.to_markdown(), json=text)

    def _cells(self) -> list[list[str]]:
        """Return every row's cells, with the sides in a case's first row only."""
        before = [None, *self.rows[:-1]]
        return [
            _cells(row, has_sides=last is None or (row.case, row.size) != (last.case, last.size))
            for last, row in zip(before, self.rows, strict=True)
        ]

    def to_markdown(self) -> str:
        """Return the table as a page."""
        repeats = _span(row.num_repeats for row in self.rows)
        processes = _span(row.num_processes for row in self.rows)
        lines = [
            *machine_lines(self.machine, self.title),
            "",
            self.method.strip(),
            "",
            "Sides take turns in one repetition, and a measure is computed within it; the figure is the",
            "median over processes of their medians over repetitions. Beside it are the quartiles and the",
            "worst of all repetitions, the lowest and the highest process, and the medians of the sides.",
            f"Repetitions: {repeats}; processes: {processes}. Made by",
            "",
            *(f"    {command}" for command in self.commands),
            "",
            *table_lines(_COLUMNS, self._cells()),
            *_bounds(self.rows),
        ]
        return "\n".join(lines) + "\n"


def _bounds(rows: Sequence[Row]) -> list[str]:
    missed = {row.case: row.bound for row in rows if row.reached is False}
    lines = [f"- {name}: {bound or 'Not known.'}" for name, bound in missed.items()]
    return ["", "## What bounds the targets missed", "", *lines] if lines else []


def _span(numbers: Iterable[int]) -> str:
    different = sorted(set(numbers))
    return " to ".join(str(number) for number in (different[:1] + different[1:][-1:]))


def _cells(row: Row, *, has_sides: bool) -> list[str]:
    digits = 1 if row.measure.endswith(("µs", "MiB")) else 3
    sign = "≥" if row.is_floor else "≤"
    sides = ", ".join(f"{name} {value:,.{1 if value < 1000 else 0}f}" for name, value in row.sides.items())
    value = "" if row.value is None else f"{row.value:.{digits}f}"
    return [
        row.case,
        row.size,
        row.measure,
        value,
        _pair(row.quartiles, digits),
        "" if row.worst is None else f"{row.worst:.{digits}f}",
        _pair(row.processes, digits),
        "" if row.target is None else f"{sign} {row.target:g}",
        {True: "yes", False: "no", None: ""}[row.reached],
        row.note.replace("|", "/") or (f"{row.unit}: {sides}" if has_sides else ""),
    ]


def _pair(values: tuple[float, float] | None, digits: int) -> str:
    return "" if values is None else f"{values[0]:.{digits}f} – {values[1]:.{digits}f}"
