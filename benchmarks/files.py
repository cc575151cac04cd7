"""What every report is written as: a markdown file with tables, and the same numbers as JSON beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def write_report(folder: Path, name: str, *, markdown: str, json: str) -> Path:
    """Write ``<name>.md`` and ``<name>.json``, and return the markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / name
    stem.with_suffix(".json").write_text(json, encoding="utf-8")
    written = stem.with_suffix(".md")
    written.write_text(markdown, encoding="utf-8")
    return written


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a markdown table, its first column to the left and the others to the right."""
    return [_line(head), _line(["---"] + ["---:"] * (len(head) - 1)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
