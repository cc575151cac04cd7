"""Runs a table's cases, in the process that ``python -m benchmarks`` starts for it."""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import importlib
import io
import pstats
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.case import BenchmarkCase, Measure, NotMeasuredError, Plan, Sample

_PROFILE_LINES: Final = 40


@dataclasses.dataclass(slots=True)
class CaseResult:
    """The samples of one case in one process, and the reason if it was not measured to the end."""

    name: str
    size: str
    unit: str
    measures: tuple[Measure, ...]
    samples: list[Sample] = dataclasses.field(default_factory=list)
    note: str = ""


def run(plan: Plan, repeats: int) -> Iterator[list[CaseResult]]:
    """Run every case; yields the results so far after each repetition."""
    results = [CaseResult(case.name, case.size, case.unit, case.measures) for case in plan.cases]
    pairs = list(zip(plan.cases, results, strict=True))
    for group in [pairs] if plan.in_rounds else [[pair] for pair in pairs]:
        for _ in _run_group(group, repeats):
            yield results
    yield results


def _run_group(group: list[tuple[BenchmarkCase, CaseResult]], repeats: int) -> Iterator[None]:
    samplers = []
    for case, result in group:
        with _noting(result):
            samplers.append((case.make(), case.max_repeats or repeats, result))
    for repeat in range(repeats):
        # Each round starts with another case, so that none always follows the same one.
        first = repeat * len(samplers) // repeats
        for sampler, max_repeats, result in samplers[first:] + samplers[:first]:
            if repeat < max_repeats and not result.note:
                with _noting(result):
                    result.samples.append(sampler())
                yield


@contextlib.contextmanager
def _noting(result: CaseResult) -> Iterator[None]:
    try:
        yield
    except NotMeasuredError as error:
        result.note = str(error)


def table_module(table: str) -> Any:
    """Return the table's module: ``plan`` and, for options of its own, ``add_options``."""
    name = {"peers-local": "peers", "peers-serving": "peers", "sandbox": "remote"}.get(table, table)
    return importlib.import_module(f"benchmarks.tables.{name.replace('-', '_')}")


def parser_of(table: str) -> argparse.ArgumentParser:
    """Return a parser of a table's own options."""
    module = table_module(table)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {table}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return parser


class TableRun:
    """A table in this process; the command calls it repetition by repetition.

    Args:
        options: The table's own options.
        settings: Other attributes that its module reads beside them.
    """

    def __init__(self, table: str, options: Sequence[str], repeats: int, settings: dict[str, Any]) -> None:
        parser = parser_of(table)
        args = parser.parse_args(options, argparse.Namespace(table=table, **settings))
        with contextlib.ExitStack() as stack:
            self._plan: Plan = table_module(table).plan(args, stack)
            if not self._plan.cases:
                parser.error("no case has these words in its name")
            self._stack = stack.pop_all()
        self._text = str(table_module(table).__doc__)
        self._repetitions, self._profile = run(self._plan, repeats), cProfile.Profile()
        self._results: list[CaseResult] = []

    def plan(self) -> Plan:
        """Return the plan without its cases."""
        return dataclasses.replace(self._plan, cases=(), text=self._text)

    def num_cases(self) -> int:
        """Return the number of cases."""
        return len(self._plan.cases)

    def advance(self, *, is_profiled: bool) -> bool:
        """Run one repetition; returns False where all have been run."""
        with self._profile if is_profiled else contextlib.nullcontext():
            results = next(self._repetitions, None)
        self._results = results or self._results
        return results is not None

    def results(self) -> list[CaseResult]:
        """End the processes that the table has started, and return the results of its cases."""
        self.close()
        return self._results

    def close(self) -> None:
        """End the processes that the table has started."""
        self._stack.close()

    def profile(self) -> str:
        """Return the functions in which most time was spent."""
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(_PROFILE_LINES)
        return text.getvalue()
