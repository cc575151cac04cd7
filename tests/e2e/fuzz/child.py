"""The process of one round: reads it from standard input and writes ``report.json`` into a given folder."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from nnsight_engine.modeling.bundled import bundled_model_path
from tests.e2e.fuzz.bench import Bench, Setting
from tests.e2e.fuzz.cases import Author
from tests.e2e.fuzz.rounds import BUNDLED, MOST_FAILURES, SHRINKING_S, Report, Round
from tests.e2e.fuzz.world import Json
from tests.families.checkpoints import write_checkpoint

_CASES_BETWEEN_LOOKS = 20


def play(played: Round, folder: Path) -> Report:
    """Play a round on a server that it starts."""
    bench = open_bench(played, folder)
    report = Report()
    try:
        if played.case is not None:
            _try(bench, played, played.case, report)
        else:
            _try_many(bench, played, report)
    finally:
        report.counts = dict(bench.counts)
        bench.close()
    return report


def open_bench(played: Round, folder: Path) -> Bench:
    """Start the server of a round."""
    if played.family == BUNDLED:
        setting = Setting(bundled_model_path(), played.dtype, played.shape, is_large=True)
        return Bench(setting, max_prompt=60, max_generated=8)
    model = write_checkpoint(played.family, folder / "model")
    return Bench(Setting(model, played.dtype, played.shape))


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
        smallest = case if played.case is not None else bench.smallest(case, SHRINKING_S)
        report.failures.append((found[:4], dataclasses.replace(played, case=smallest).to_json()))


def main() -> None:
    """Play the round on standard input."""
    folder = Path(sys.argv[1])
    report = play(Round.from_json(sys.stdin.read()), folder)
    (folder / "report.json").write_text(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
