"""From samples to a table: on the terminal, and as markdown and JSON in ``benchmarks/results/``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.case import SCALES
from benchmarks.files import table_lines, write_report
from benchmarks.machine import Machine, machine_lines
from benchmarks.precision import DTYPE_NAME
from benchmarks.runner import CaseResult

_COLUMNS: Final = (
    "case", "size", "measure", "median", "quartiles", "worst", "processes", "target", "reached", "sides",
)  # fmt: skip
_METHOD: Final = """\
Models have weights in {dtype}. Sides take turns in one repetition, and a measure is computed within it; the
figure is the median over processes of their medians over repetitions. Beside it are the quartiles and the
worst of all repetitions, the lowest and the highest process, and the medians of the sides. Repetitions:
{repeats}; processes: {processes}. Made by
"""


class ReportError(Exception):
    """Two runs cannot be one table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One measure of one case.

    Attributes:
        value: The median over processes of their medians over repetitions; None where it was not measured.
        quartiles: First and third quartile of all repetitions.
        processes: The lowest and the highest process's median. Memory layout makes engines of different
            processes differ by several percent, which no number of repetitions shows.
        reached: Whether the value keeps the target, None where there is none.
        note: Why it was not measured.
        sides: Median of each side, in ``unit``.
    """

    case: str
    size: str
    measure: str
    value: float | None
    quartiles: tuple[float, ...]
    worst: float | None
    processes: tuple[float, ...]
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
        """The row's identity: a later row with the same key replaces it."""
        return self.case, self.size, self.measure

    def cells(self, *, has_sides: bool) -> list[str]:
        """Return the row's cells; a case shows its sides once."""
        digits = 1 if self.measure.endswith(("µs", "MiB")) else 3

        def text(*values: float | None) -> str:
            return " – ".join(f"{value:.{digits}f}" for value in values if value is not None)

        sides = [f"{name} {value:,.{1 if value < 1000 else 0}f}" for name, value in self.sides.items()]
        return [
            *self.key,
            text(self.value),
            text(*self.quartiles),
            text(self.worst),
            text(*self.processes),
            "" if self.target is None else f"{'≥' if self.is_floor else '≤'} {self.target:g}",
            {True: "yes", False: "no", None: ""}[self.reached],
            self.note.replace("|", "/") or (f"{self.unit}: {', '.join(sides)}" if has_sides else ""),
        ]


def rows_of(processes: Sequence[Sequence[CaseResult]]) -> list[Row]:
    """Return the table's rows, from the results of each process."""
    return [row for results in zip(*processes, strict=True) for row in _rows(results)]


def _rows(results: Sequence[CaseResult]) -> list[Row]:
    """Return the rows of one case."""
    case, measured = results[0], [one.samples for one in results if one.samples]
    samples, scale = [sample for own in measured for sample in own], SCALES.get(case.unit, 1.0)
    names = samples[0] if samples else ()
    sides = {name: scale * float(np.median([one[name] for one in samples])) for name in names}
    rows = []
    for measure in case.measures:
        medians = [value for own in measured if (value := measure.of(own)) is not None]
        each = [] if measure.takes_all else [measure.of([sample]) for sample in samples]
        flat = [value for value in each if value is not None]
        value = float(np.median(medians)) if medians else None
        reached = None
        if value is not None and measure.target is not None:
            reached = value >= measure.target if measure.is_floor else value <= measure.target
        row = Row(
            case=case.name,
            size=case.size,
            measure=measure.name,
            value=value,
            quartiles=tuple(np.quantile(flat, [0.25, 0.75]).tolist()) if flat else (),
            worst=(min if measure.is_floor else max)(flat, default=None),
            processes=(min(medians), max(medians)) if len(medians) > 1 else (),
            target=measure.target,
            is_floor=measure.is_floor,
            reached=reached,
            bound=measure.bound,
            note=next((one.note for one in results if one.note), ""),
            unit=case.unit,
            sides=sides,
            num_repeats=max(map(len, measured), default=0),
            num_processes=len(measured),
        )
        rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """One table: where and with which commands it was measured, its rows, and what they mean.

    ``text`` is the docstring of the table's module: a title and the method.
    """

    machine: Machine
    name: str
    text: str
    commands: Sequence[str]
    rows: Sequence[Row]

    @property
    def _stem(self) -> str:
        return f"{self.machine.date}-{self.name}"

    def added_to(self, folder: Path) -> BenchmarkReport:
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
        others = [row for row in msgspec.convert(content["rows"], list[Row]) if row.key not in keys]
        commands = [*content["commands"], *self.commands]
        return dataclasses.replace(
            self, machine=self.machine.busier(before), commands=commands, rows=[*others, *self.rows]
        )

    def write(self, folder: Path) -> Path:
        """Write ``<date>-<name>.md`` and ``.json``, and return the markdown file."""
        content = {
            "machine": dataclasses.asdict(self.machine),
            "commands": list(self.commands),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        text = json.dumps(content, indent=1) + "\n"
        return write_report(folder, self._stem, markdown=self.to_markdown(), json=text)

    def table(self) -> list[str]:
        """Return the rows as lines of a markdown table."""
        before = [None, *(row.key[:2] for row in self.rows)]
        pairs = zip(self.rows, before, strict=False)
        return table_lines(_COLUMNS, [row.cells(has_sides=row.key[:2] != last) for row, last in pairs])

    def to_markdown(self) -> str:
        """Return the table as a page."""
        title, _, method = self.text.partition("\n")
        missed = {row.case: row.bound for row in self.rows if row.reached is False}
        bounds = [f"- {name}: {bound or 'Not known.'}" for name, bound in missed.items()]
        repeats = _span([row.num_repeats for row in self.rows])
        processes = _span([row.num_processes for row in self.rows])
        lines = [
            *machine_lines(self.machine, f"{title.removesuffix('.')} ({self.name})"),
            "",
            method.strip(),
            "",
            _METHOD.format(dtype=DTYPE_NAME, repeats=repeats, processes=processes),
            *(f"    {command}" for command in self.commands),
            "",
            *self.table(),
            *(["", "## What bounds the targets missed", "", *bounds] if bounds else []),
        ]
        return "\n".join(lines) + "\n"


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low} to {high}" if low < high else str(low)
