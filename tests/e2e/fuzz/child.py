"""What runs in the process of a round."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from tests.e2e.fuzz.bench import Bench
from tests.e2e.fuzz.cases import Author
from tests.e2e.fuzz.rounds import MOST_FAILURES, Report, Round
from tests.e2e.fuzz.world import Json

_CASES_BETWEEN_LOOKS = 20


def check(text: str, folder: Path) -> dict[str, Any]:
    """Play a round, given as JSON, on a server that it starts; return the report's fields."""
    played = Round.from_json(text)
    bench = Bench(played, folder)
    report = Report()
    try:
        if played.case is not None:
            _try(bench, played, played.case, report)
        else:
            _try_many(bench, played, report)
    finally:
        report.counts = dict(bench.counts)
        bench.close()
    return dataclasses.asdict(report)


def _try_many(bench: Bench, played: Round, report: Report) -> None:
    author = Author(bench.world, played.seed)
    until = time.monotonic() + played.seconds
    while time.monotonic() < until and len(report.failures) < MOST_FAILURES:
        for _ in range(_CASES_BETWEEN_LOOKS):
            _try(bench, played, author.case(), report)
            if time.monotonic() > until or len(report.failures) >= MOST_FAILURES:
                break
        left = bench.left_behind()
        if left:
            report.failures.append(([f"the engine still holds {left}"], played.to_json()))


def _try(bench: Bench, played: Round, case: list[Json], report: Report) -> None:
    found = bench.faults(case)
    if found:
        report.failures.append((found[:4], dataclasses.replace(played, case=case).to_json()))
