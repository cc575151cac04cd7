"""What being able to intervene costs in memory while nobody does, and what stays when somebody has.

    python -m benchmarks.idle_memory [--repeats 5] [--quick]

Resident memory of an engine's process able to intervene, beside that of a plain one in which nothing of ours
is imported: separate processes, taking turns, medians.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import parsed, parser_of, show
from benchmarks.files import table_lines, write_report
from benchmarks.machine import Machine, announced_machine, machine_lines
from benchmarks.precision import DTYPE_NAME
from benchmarks.processes import ChildError, run_child
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_MIB: Final = 50.0
_MIB: Final = 1024 * 1024
_PLAIN, _IDLE, _USED = "plain vLLM", "able to intervene, idle", "able to intervene, after requests that did"
_PROCESSES: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    _PLAIN: ("benchmarks.plain_probe", ()),
    _IDLE: ("benchmarks.probe", ()),
    _USED: ("benchmarks.probe", ("--used",)),
}
_COLUMNS = ("process", "resident, MiB", "more than plain, MiB", "quartiles", "target", "reached")
_METHOD = """\
SmolLM2-135M-Instruct in {dtype}, eager. Each process loads an engine and serves the same plain requests; the
last kind also serves requests that steer, and requests that capture, at all layers. Medians over {repeats}
processes of each kind, which take turns; the differences are those of neighbours.
Made by `python -m benchmarks.idle_memory --repeats {repeats}`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One run's results: resident MiB of each process, by kind."""

    machine: Machine
    sizes: Mapping[str, Sequence[float]]

    def rows(self) -> list[list[str]]:
        """Return the table's rows."""
        return [self._row(kind) for kind in self.sizes]

    def _row(self, kind: str) -> list[str]:
        more = sorted(own - plain for own, plain in zip(self.sizes[kind], self.sizes[_PLAIN], strict=True))
        middle = statistics.median(more)
        is_target = kind == _IDLE
        quartiles = statistics.quantiles(more, n=4) if len(more) > 1 else more
        return [
            kind,
            f"{statistics.median(self.sizes[kind]):.0f}",
            "" if kind == _PLAIN else f"{middle:+.1f}",
            "" if kind == _PLAIN else f"{quartiles[0]:+.1f} – {quartiles[-1]:+.1f}",
            f"≤ {_TARGET_MIB:g}" if is_target else "",
            ("yes" if middle <= _TARGET_MIB else "no") if is_target else "",
        ]

    def table(self) -> Table:
        """Return the table for the terminal."""
        table = Table(*_COLUMNS, title="Memory of an engine's process")
        for row in self.rows():
            table.add_row(*row)
        return table

    def write(self, folder: Path) -> Path:
        """Write ``<date>-memory.md`` and ``.json``, and return the markdown file."""
        repeats = len(self.sizes[_PLAIN])
        method = _METHOD.format(repeats=repeats, dtype=DTYPE_NAME)
        lines = machine_lines(self.machine, "Memory of an engine's process")
        lines += ["", method, "", *table_lines(_COLUMNS, self.rows())]
        content = {"machine": dataclasses.asdict(self.machine), "resident_mib": self.sizes}
        return write_report(
            folder,
            f"{self.machine.date}-memory",
            markdown="\n".join(lines) + "\n",
            json=json.dumps(content, indent=1) + "\n",
        )


def main() -> int:
    """Measure, print, and return the exit status."""
    args = parsed(parser_of("benchmarks.idle_memory", __doc__, repeats=5), quick_repeats=1)
    console = Console()
    machine = announced_machine(console)
    model = str(bundled_model_path())
    sizes: dict[str, list[float]] = {kind: [] for kind in _PROCESSES}
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("Processes", total=len(_PROCESSES) * args.repeats)
            for _ in range(args.repeats):
                for kind, (module, options) in _PROCESSES.items():
                    for event in run_child(module, ["--model", model, *options], {}):
                        sizes[kind].append(event["resident_bytes"] / _MIB)
                    progress.advance(task)
    except ChildError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    show(Report(machine, sizes), console, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
