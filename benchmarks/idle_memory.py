"""What being able to intervene costs in memory while nobody does.

    python -m benchmarks.idle_memory [--repeats 5]

Resident memory of an engine process able to intervene, minus that of a plain one: separate
processes, taking turns, medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Final

from rich.console import Console
from rich.progress import Progress

from benchmarks.processes import ChildError, run_child

_TARGET_MIB: Final = 50
_MIB: Final = 1024 * 1024


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle_memory", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="processes of each kind")
    args = parser.parse_args()
    console = Console()
    sizes: dict[str, list[float]] = {"plain vLLM": [], "able to intervene": []}
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("Processes", total=2 * args.repeats)
            for _ in range(args.repeats):
                for kind, own in sizes.items():
                    options = ["--able"] if kind == "able to intervene" else []
                    own += [
                        event["resident_bytes"] / _MIB for event in run_child("benchmarks.probe", options, {})
                    ]
                    progress.advance(task)
    except ChildError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    plain, able = (statistics.median(own) for own in sizes.values())
    for kind, own in sizes.items():
        listed = ", ".join(f"{size:.0f}" for size in sorted(own))
        console.print(f"{kind}: median {statistics.median(own):.0f} MiB of {listed}")
    console.print(f"Able to intervene, idle: {able - plain:+.1f} MiB (target: under {_TARGET_MIB})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
