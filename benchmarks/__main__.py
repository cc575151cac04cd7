"""The benchmarks: ratios against a baseline that takes turns with the variants.

    python -m benchmarks [TABLE] [--repeats N] [--processes N] [--quick] [--add] [--profile] [--output FOLDER]
        [options of the table]

Run it on a machine that does nothing else. Each run writes a table to ``benchmarks/results/``; ``--quick``
prints one and writes nothing. ``--add`` adds the rows to the day's table for this commit and machine.
``python -m benchmarks TABLE --help`` lists a table's own options.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.case import Plan
from benchmarks.machine import OtherWork, announced_machine, load_line
from benchmarks.process import ChildObject, ProcessError
from benchmarks.report import BenchmarkReport, ReportError, rows_of
from benchmarks.runner import CaseResult, parser_of
from benchmarks.tables import TABLES
from nnsight_engine.modeling.bundled import BundledModelError, bundled_model_path, console_progress

_RESULTS: Final = Path(__file__).parent / "results"
_DEFAULT: Final = "serving"


def main() -> int:
    """Run the command line and return its exit status."""
    args, options = arguments_of(sys.argv[1:])
    console = Console()
    machine = announced_machine(console)
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    try:
        with console_progress("Bundled model") as progress:
            bundled_model_path(progress=progress)
        others = OtherWork()
        plan, results = _measured(args, options, console)
        versions = {**plan.versions, **machine.versions}
        machine = dataclasses.replace(machine, versions=versions, other_cores=others.num_cores())
        name, rows = args.table + plan.suffix, rows_of(results)
        report = BenchmarkReport(machine, name, plan.text, [command], rows)
        report = report.added_to(args.output) if args.add else report
    except (BundledModelError, ProcessError, ReportError) as error:
        console.print(getattr(error, "output", ""), markup=False, soft_wrap=True)
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    console.print("\n".join(report.table()), markup=False, highlight=False, soft_wrap=True)
    console.print(load_line(machine), highlight=False, soft_wrap=True)
    if args.quick or args.profile:
        console.print("Nothing was written.")
    else:
        console.print(f"Written to {report.write(args.output)}", soft_wrap=True)
    return 0


def arguments_of(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the common options, and the table's own ones."""
    lines = [f"  {name:14} {table.summary}" for name, table in TABLES.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="\n".join([str(__doc__), "tables:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    has_table = bool(arguments) and not arguments[0].startswith("-")
    name, own = (arguments[0], arguments[1:]) if has_table else (_DEFAULT, arguments)
    if name not in TABLES:
        parser.error(f"TABLE must be one of {', '.join(TABLES)}; got {name}")
    if has_table and own and own[0] in {"-h", "--help"}:
        parser_of(name).print_help()
        sys.exit(0)
    table = TABLES[name]
    parser.add_argument("--repeats", type=int, help="repetitions of every case in each process")
    parser.add_argument("--processes", type=int, help="processes, each with engines of its own")
    parser.add_argument("--quick", action="store_true", help="few repetitions, printed and not written")
    parser.add_argument("--add", action="store_true", help="add the rows to the day's table")
    parser.add_argument("--profile", action="store_true", help="print where the process's time goes")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the tables")
    end = own.index("--") if "--" in own else len(own)
    args, rest = parser.parse_known_args(own[:end])
    args.table, args.engine_arguments = name, own[end + 1 :]
    args.repeats = args.repeats or (table.quick_repeats if args.quick else table.repeats)
    args.processes = args.processes or (1 if args.quick else table.processes)
    if min(args.repeats, args.processes) < 1:
        parser.error("--repeats and --processes must be positive")
    return args, rest


def _measured(
    args: argparse.Namespace, options: list[str], console: Console
) -> tuple[Plan, list[list[CaseResult]]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{args.table}: preparing", total=None)
        for number in range(args.processes):
            settings = {"quick": args.quick, "process": number, "engine_arguments": args.engine_arguments}
            arguments = (args.table, options, args.repeats, settings)
            variables = TABLES[args.table].variables
            with ChildObject("benchmarks.runner:TableRun", *arguments, variables=variables) as table:
                plan = table.call("plan")
                total = args.processes * args.repeats * table.call("num_cases")
                progress.update(task, total=total, description=args.table)
                while table.call("advance", is_profiled=args.profile):
                    progress.advance(task)
                results.append(table.call("results"))
                if args.profile:
                    console.print(table.call("profile"), markup=False, soft_wrap=True)
    return plan, results


if __name__ == "__main__":
    sys.exit(main())
