"""How long one tenant waits for a first token while another floods the server.

    python -m benchmarks.fairness [--repeats 5] [--quick]

The server as it is started, with a key for each of two tenants; the clients are processes of their own. One
tenant sends small requests, now and then; the other one keeps 64 running. Compared are the first one's times
to the first token with the flood and without, and what the flood gets done with the other one there and
without, and all of it with shares (``fair_window_s``) and without.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console

from benchmarks.command import parsed, parser_of, show
from benchmarks.fairness.load import FLOODS
from benchmarks.line_process import LineProcess
from benchmarks.machine import announced_machine
from benchmarks.precision import DTYPE_NAME
from benchmarks.servers import created_key, served
from benchmarks.tracing.report import Report
from benchmarks.tracing.timing import Case, Measure, Row, Sample, Sampler, measure
from nnsight_engine import bundled_model_path

_TARGET: Final = 1.5
_SETTLE_S: Final = 2.0
_WARM: Final = 10


class Tenants:
    """Two tenants of one server."""

    def __init__(self, url: str, keys: tuple[str, str], model: str, num_probes: int) -> None:
        """Start both clients."""
        self._probe, self._flood = (
            LineProcess("benchmarks.fairness.load", "probe", url, keys[0], model),
            LineProcess("benchmarks.fairness.load", "flood", url, keys[1], model),
        )
        self._num_probes = num_probes
        self._probe.ask(count=_WARM)

    def sample(self, flood: int) -> Sample:
        """Run one repetition against one of the floods."""
        quiet = self._probe.ask(count=self._num_probes)
        self._flood.ask(start=flood)
        time.sleep(_SETTLE_S)
        self._probe.ask(count=_WARM)
        beside_s, (flooded, beside) = _timed(lambda: self._done(self._num_probes))
        time.sleep(_SETTLE_S + 5.0)  # nobody else counts any more
        alone_s, (_, alone) = _timed(lambda: self._done(0, for_s=beside_s))
        self._flood.ask(stop=True)
        time.sleep(1.0)  # for the engine to end the rest
        sample = {
            "flooded": statistics.median(flooded),
            "quiet": statistics.median(quiet),
            "flooded, 9 of 10": statistics.quantiles(flooded, n=10)[-1],
            "a flood's token beside": beside_s / max(beside, 1),
            "a flood's token alone": alone_s / max(alone, 1),
        }
        Console().print({name: f"{1e3 * seconds:.2f} ms" for name, seconds in sample.items()})
        return sample

    def _done(self, num_probes: int, for_s: float = 0.0) -> tuple[list[float], int]:
        """Return the probes' times, and how many tokens of the flood were done beside."""
        before = self._flood.ask()
        seconds = self._probe.ask(count=num_probes) if num_probes else []
        time.sleep(for_s)
        return seconds, self._flood.ask() - before

    def close(self) -> None:
        """End both."""
        self._probe.close()
        self._flood.close()


def _timed(work: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


@contextmanager
def _tenants(model: str, window_s: str, num_probes: int) -> Iterator[Tenants]:
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "NNSIGHT_ENGINE_DATA_DIR": f"{folder}/data",
            "NNSIGHT_ENGINE_RESULT_DIR": f"{folder}/results",
            "NNSIGHT_ENGINE_FAIR_WINDOW_S": window_s,
        }
        with served([model, "--max-model-len", "1024"], variables) as url:
            keys = created_key("few", variables), created_key("many", variables)
            tenants = Tenants(url, keys, model, num_probes)
            yield tenants
            tenants.close()


def _rows(model: str, window_s: str, args: argparse.Namespace) -> list[Row]:
    shares = window_s != "0"
    measures = (
        Measure("flooded / quiet", lambda one: one["flooded"] / one["quiet"], _TARGET if shares else None),
        Measure("9 of 10 / quiet", lambda one: one["flooded, 9 of 10"] / one["quiet"]),
        Measure(
            "flood's tokens, beside / alone",
            lambda one: one["a flood's token alone"] / one["a flood's token beside"],
        ),
    )
    rows = []
    with _tenants(model, window_s, 10 if args.quick else 40) as tenants:
        for index, flood in enumerate(FLOODS):
            size = "with shares" if shares else "without"
            make = functools.partial(_sampler, tenants, index)
            case = Case(flood.name, size, make, measures)
            rows += measure(case, args.repeats if shares else 1)
    return rows


def _sampler(tenants: Tenants, flood: int) -> Sampler:
    return lambda: tenants.sample(flood)


def main() -> int:
    """Run the command line and return its exit status."""
    args = _arguments()
    console = Console()
    machine = announced_machine(console)
    model = str(bundled_model_path())
    rows = _rows(model, args.window, args) + ([] if args.quick else _rows(model, "0", args))
    report = Report(
        machine,
        "fairness",
        "Shares of tenants",
        _METHOD.format(repeats=args.repeats, dtype=DTYPE_NAME),
        [args.repeats],
        rows,
    )
    show(report, console, args)
    return 0


def _arguments() -> argparse.Namespace:
    parser = parser_of("benchmarks.fairness", __doc__, repeats=5)
    parser.add_argument("--window", default="5", help="NNSIGHT_ENGINE_FAIR_WINDOW_S; 0 for no shares")
    return parsed(parser, quick_repeats=1)


_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, eager, served by `nnsight-engine serve` with defaults; both clients on the
same cores, in processes of their own. The tenant with few requests sends prompts of 16 tokens one after
another, with pauses of 50 to 250 ms, and takes the time to the first event of the stream; the other one
floods. Medians of 40 requests for each side of a repetition, ratios within a repetition. A flood's tokens are
those of prompts that are done and of answers; "alone" begins 7 s after the other tenant's last request.
Medians over {repeats} repetitions with shares, one without. Made by `python -m benchmarks.fairness --repeats
{repeats}`."""


if __name__ == "__main__":
    sys.exit(main())
