"""The capacity of one server by concurrency: plain requests alone, and beside requests with interventions.

    python -m loadtests.capacity [--concurrency 1 2 4 8 16 32] [--loads plain mixed one-tenant] [--seconds 24]
        [--add] [--url URL] [--admin-key-file FILE] [--output FOLDER] [-- SERVE OPTIONS]

Each user sends one request after another without a pause. Under the mixed load half of them are plain, the
neighbours, and the others steer, read the lens and capture: three tenants, of which the plain one has more
than its share. With ``one-tenant`` all requests are of one tenant, so that only interventions differ from the
plain load. Requests that begin in the first quarter are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from benchmarks.files import write_report
from benchmarks.machine import Machine, announced_machine
from benchmarks.servers import ServerError
from loadtests.capacity_table import LOADS, PHASES, Capacity, CapacityPoint, cells, counts_of, page, point_of
from loadtests.command import add_server_options, split_arguments
from loadtests.run_process import RunError, run_in_process
from loadtests.run_spec import TENANT_OF
from loadtests.server_setup import LoadTestError, TestedServer, server_at
from loadtests.summary import read

_RESULTS: Final = Path(__file__).parents[1] / "benchmarks" / "results"
_NO_RUN: Final = 2
_TENANT: Final = TENANT_OF["steered-different"]


def main() -> int:
    """Run the command line and return its exit status."""
    args, console = _arguments(), Console()
    machine = announced_machine(console)
    file = args.output / f"{machine.date}-capacity.json"
    points = read(file, Capacity).points if args.add and file.exists() else []
    try:
        with server_at(args.url, args.admin_key or "", args.serve) as server:
            for load, concurrency in itertools.product(args.loads, args.concurrency):
                if load != "plain" and concurrency == 1:
                    continue  # the load needs a second user
                point = _measured(server, load, concurrency, args, machine)
                points = [one for one in points if (one.load, one.concurrency) != (load, concurrency)]
                points = sorted([*points, point], key=lambda one: (LOADS.index(one.load), one.concurrency))
                console.print(" ".join(cells(point)))
                _write(file, machine, points)
    except (LoadTestError, RunError, ServerError) as error:
        Console(stderr=True).print(f"loadtests.capacity: {error}", markup=False, soft_wrap=True)
        return _NO_RUN
    console.print(f"Written to {args.output}", soft_wrap=True)
    return 0


def _write(file: Path, machine: Machine, points: list[CapacityPoint]) -> None:
    content = msgspec.json.encode(Capacity(machine=dataclasses.asdict(machine), points=points))
    text = msgspec.json.format(content, indent=1).decode() + "\n"
    write_report(file.parent, file.stem, markdown=page(machine, points), json=text)


def _measured(
    server: TestedServer, load: str, concurrency: int, args: argparse.Namespace, machine: Machine
) -> CapacityPoint:
    counts = counts_of(load, concurrency)
    with server.prepared_run(f"capacity, {load}", "steady", args.seconds, counts) as spec:
        keys = spec.keys
        if load == "one-tenant":
            keys = dict.fromkeys(keys, keys.get(_TENANT, ""))
        changed = msgspec.structs.replace(spec, phases=list(PHASES), has_pauses=False, keys=keys)
        summary = run_in_process(changed, args.reports / f"{load}-{concurrency}", machine)
    return point_of(load, concurrency, summary)


def _arguments() -> argparse.Namespace:
    own, serve = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["plain", "mixed"])
    parser.add_argument("--seconds", type=float, default=24.0, help="of each run")
    parser.add_argument("--add", action="store_true", help="to the table that the day has")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the table")
    parser.add_argument(
        "--reports", type=Path, default=Path("build/capacity"), help="folder of locust's reports"
    )
    add_server_options(parser)
    args = parser.parse_args(own)
    args.serve = serve
    return args


if __name__ == "__main__":
    sys.exit(main())
