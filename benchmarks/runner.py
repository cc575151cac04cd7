"""Runs a table's cases, in the process that ``python -m benchmarks`` starts for it.

Reports events: the plan, each repetition as it is done, and why a case was not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib
import pstats
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from benchmarks.case import Case, NotMeasuredError, Plan, Sample, Sampler, rotated
from benchmarks.process import Event, EventPipe, events_fd
from benchmarks.tables import TABLES

Report = Callable[[Event], None]

_PROFILE_LINES: Final = 40


class TableModule(Protocol):
    """What a module of ``benchmarks.tables`` has."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the table's own options."""

    def plan(self, args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
        """Return what is measured; what it starts ends with the stack."""


def run(plan: Plan, repeats: int, report: Report) -> None:
    """Run every case and report its samples."""
    report({"plan": _described(plan)})
    cases = list(enumerate(plan.cases))
    for group in [cases] if plan.in_rounds else [[case] for case in cases]:
        _run_group(group, repeats, report)


def _run_group(group: list[tuple[int, Case]], repeats: int, report: Report) -> None:
    samplers: dict[int, Sampler] = {}
    samples: dict[int, list[Sample]] = defaultdict(list)
    for number, case in group:
        with _noting(number, report):
            samplers[number] = case.make()
    for repeat in range(repeats):
        # Each round starts with another case, so that none always follows the same one.
        for number, case in rotated(group, repeat * len(group) // repeats):
            sampler = samplers.pop(number, None)
            if sampler is None or repeat >= (case.max_repeats or repeats):
                continue
            with _noting(number, report):  # a sampler that fails is not called again
                sample = dict(sampler())
                samplers[number] = sampler
                samples[number].append(sample)
                values = [None if one.of is None else one.of(sample) for one in case.measures]
                report({"case": number, "sample": sample, "values": values})
    for number, case in group:
        overall = [one.of_all and one.of_all(samples[number]) for one in case.measures]
        if samples[number] and any(value is not None for value in overall):
            report({"case": number, "overall": overall})


@contextlib.contextmanager
def _noting(number: int, report: Report) -> Any:
    try:
        yield
    except NotMeasuredError as error:
        report({"case": number, "note": str(error)})


def _described(plan: Plan) -> Event:
    cases = [
        {
            "name": case.name,
            "size": case.size,
            "unit": case.unit,
            "measures": [
                {"name": one.name, "target": one.target, "is_floor": one.is_floor, "bound": one.bound}
                for one in case.measures
            ],
        }
        for case in plan.cases
    ]
    return {
        "name": plan.name,
        "title": plan.title,
        "method": plan.method,
        "versions": dict(plan.versions),
        "cases": cases,
    }


def parser_of(table: str) -> tuple[argparse.ArgumentParser, TableModule]:
    """Return a parser of a table's own options, and its module."""
    module: Any = importlib.import_module(TABLES[table].module)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {table}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(table=table, quick=False, process=0)
    module.add_options(parser)
    return parser, module


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a table's command line; what follows ``--`` is left in ``rest``."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:place])
    args.rest = list(arguments[place + 1 :])
    return args


def main() -> None:
    """Measure, and report through the pipe."""
    (table, *arguments), fd = events_fd(sys.argv)
    parser, module = parser_of(table)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--process", type=int, required=True, help="its number among a table's processes")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parsed(parser, arguments)
    pipe = EventPipe(fd)
    with contextlib.ExitStack() as stack:
        plan = module.plan(args, stack)
        if not plan.cases:
            parser.error("no case has these words in its name")
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(run, plan, args.repeats, pipe.send)
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(_PROFILE_LINES)
        else:
            run(plan, args.repeats, pipe.send)


if __name__ == "__main__":
    main()
