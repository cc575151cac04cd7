"""Random requests against transformers, for as long as one likes: ``make fuzz``.

``python -m tests.e2e.fuzz --minutes 5`` plays less. Rounds take turns over models, dtypes and shapes of the
engine. What is wrong is printed with a round as JSON that shows it; ``--replay FILE`` plays such a round
again. Ends with status 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.e2e.fuzz.rounds import DTYPES, FAMILIES, SHAPES, Report, Round, play_round

_ROUND_S: Final = 120.0


def rounds(seed: int, seconds: float) -> Iterator[Round]:
    """Return rounds without end, each with its own seed; all combinations come before one comes again."""
    settings = [(dtype, shape) for shape in SHAPES for dtype in DTYPES]
    for number, family in enumerate(itertools.cycle(FAMILIES)):
        dtype, shape = settings[number % len(settings)]
        yield Round(family, dtype, shape, seed + number, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the first round; others count on"
    )
    parser.add_argument("--replay", type=Path, help="a file with a round as JSON, to play it alone")
    options = parser.parse_args()
    if options.replay is not None:
        return _tell(Round.from_json(options.replay.read_text()), Counter())
    end, status, total = time.monotonic() + 60 * options.minutes, 0, Counter[str]()
    for played in rounds(options.seed, min(_ROUND_S, 60 * options.minutes)):
        status |= _tell(played, total)
        if time.monotonic() > end:
            break
    sys.stdout.write(f"in all: {Report(dict(total))}\n")
    return status


def _tell(played: Round, total: Counter[str]) -> int:
    sys.stdout.write(f"{played.family} {played.dtype} {played.shape}, seed {played.seed}: ")
    sys.stdout.flush()
    try:
        report = play_round(played)
    except AssertionError as error:
        sys.stdout.write(f"WRONG {error}\n{played.to_json()}\n")
        return 1
    total.update(report.counts)
    sys.stdout.write(f"{report}\n")
    sys.stdout.flush()
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
