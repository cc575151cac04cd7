"""The process whose memory is measured: ``python -m benchmarks.idle_memory`` starts it several times.

It loads one engine, serves a few plain requests so that everything lazy is there, and reports
what stays resident.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from pathlib import Path

from benchmarks.engine import Engine
from benchmarks.processes import EventPipe

_BATCH = 8
_PROMPT = range(100, 164)
_MAX_TOKENS = 16


def main() -> None:
    """Load, serve, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--able", action="store_true")
    parser.add_argument("--events-fd", type=int, required=True)
    args = parser.parse_args()
    engine = Engine(able=args.able, eager=True, max_num_seqs=_BATCH)
    for _ in range(2):
        engine.finish([engine.submit(list(_PROMPT), _MAX_TOKENS, []) for _ in range(_BATCH)])
    gc.collect()
    # What the allocator keeps for later differs by tens of MB from one equal process to the next.
    ctypes.CDLL(None).malloc_trim(0)
    EventPipe(args.events_fd).send({"resident_bytes": resident_bytes()})


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    raise OSError("memory is read from VmRSS in /proc/self/status, which has no such line; run this on Linux")


if __name__ == "__main__":
    main()
