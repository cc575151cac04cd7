"""The tables: on the terminal, and as markdown and JSON in ``benchmarks/results/``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.cases import Quantity
from benchmarks.files import table_lines, write_report
from benchmarks.machine import Machine
from benchmarks.ratios import Row

_COLUMNS = ("case", "size", "ratio", "quartiles", "target", "reached", "ours", "plain")

_TITLES = {
    Quantity.DECODE: "Decode throughput, ours / plain vLLM (size: requests in the batch)",
    Quantity.FIRST_TOKEN: "Time to first token, ours / plain vLLM (size: tokens of the prompt)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One mode's results.

    Attributes:
        mode: ``eager`` or ``compiled``.
        machine: Where they were measured.
        num_steps: Timed decode steps per side and repetition.
        rows: The results, in any order.
    """

    mode: str
    machine: Machine
    num_steps: int
    rows: Sequence[Row]

    def tables(self) -> list[Table]:
        """Return one table per quantity for the terminal."""
        tables = []
        for quantity, title in _TITLES.items():
            table = Table(title=f"{title}, {self.mode}")
            for place, column in enumerate(_COLUMNS):
                table.add_column(column, justify="left" if place == 0 else "right")
            for row in self._sorted(quantity):
                style = "red" if row.reached is False else ""
                table.add_row(*_cells(row), style=style)
            tables.append(table)
        return tables

    def write(self, folder: Path) -> Path:
        """Write ``<date>-<mode>.md`` and ``.json``, and return the markdown file."""
        name = f"{self.machine.date}-{self.mode}"
        return write_report(folder, name, markdown=self.to_markdown(), json=self.to_json())

    def to_markdown(self) -> str:
        """Return the report as markdown."""
        machine = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        busy = " **The machine was busy: these numbers show little.**" if machine.is_busy else ""
        num_repeats = self.rows[0].num_repeats
        lines = [
            f"# Against plain vLLM, {self.mode}, {machine.date}",
            "",
            f"Commit {machine.commit}; {machine.cpu}, {machine.num_cores} cores; {versions}.",
            f"Load average before the start {machine.load:.2f}.{busy}",
            "",
            "SmolLM2-135M-Instruct in bf16. Both engines live in one process with the same arguments and "
            "take strict turns.",
            "A ratio is the median over repetitions of paired ratios, quartiles beside it; the control's "
            "distance from 1 is the",
            f"error of the measurement. {num_repeats} repetitions, {self.num_steps} timed decode steps each,",
            f'made by `make bench ARGS="{self._options()}"`.',
        ]
        for quantity, title in _TITLES.items():
            unit = quantity.unit
            head = [*_COLUMNS[:-2], f"ours, {unit}", f"plain, {unit}"]
            lines += ["", f"## {title}", "", *table_lines(head, map(_cells, self._sorted(quantity)))]
        return "\n".join(lines) + "\n"

    def _options(self) -> str:
        """Return the command line that makes this report again."""
        batches = sorted({row.case.size for row in self.rows if row.case.quantity is Quantity.DECODE})
        listed = " ".join(map(str, batches))
        num_repeats = self.rows[0].num_repeats
        return f"--mode {self.mode} --batches {listed} --repeats {num_repeats} --steps {self.num_steps}"

    def to_json(self) -> str:
        """Return the report as JSON."""
        rows = [
            {
                "case": row.case.name,
                "quantity": row.case.quantity,
                "size": row.case.size,
                "ratio": row.ratio,
                "quartiles": row.quartiles,
                "target": row.case.target,
                "reached": row.reached,
                "ours": row.ours,
                "plain": row.plain,
                "unit": row.case.quantity.unit,
                "repeats": row.num_repeats,
            }
            for quantity in _TITLES
            for row in self._sorted(quantity)
        ]
        content = {
            "mode": self.mode,
            "steps": self.num_steps,
            "machine": dataclasses.asdict(self.machine),
            "rows": rows,
        }
        return json.dumps(content, indent=1) + "\n"

    def _sorted(self, quantity: Quantity) -> list[Row]:
        own = [row for row in self.rows if row.case.quantity is quantity]
        return sorted(own, key=lambda row: (row.case.name, row.case.size))


def _cells(row: Row) -> list[str]:
    case = row.case
    sign = "≥" if case.quantity is Quantity.DECODE else "≤"
    return [
        case.name,
        str(case.size),
        f"{row.ratio:.3f}",
        f"{row.quartiles[0]:.3f} – {row.quartiles[1]:.3f}",
        "" if case.target is None else f"{sign} {case.target:.2f}",
        {True: "yes", False: "no", None: ""}[row.reached],
        f"{row.ours:.1f}",
        f"{row.plain:.1f}",
    ]
