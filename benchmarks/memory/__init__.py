"""The processes whose memory is compared: the requests that all of them serve, and what they report."""

from __future__ import annotations

import argparse
import ctypes
import gc
from pathlib import Path
from typing import Final

from benchmarks.process import EventPipe

BATCH: Final = 8
PROMPT: Final = range(100, 164)
MAX_TOKENS: Final = 16
ROUNDS: Final = 2
"""Batches, so that everything that is loaded lazily is loaded."""


def options() -> argparse.ArgumentParser:
    """Return a parser of the options of every such process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    return parser


def report_memory(events_fd: int) -> None:
    """Report the resident memory after collecting garbage."""
    gc.collect()
    # What the allocator keeps differs by tens of MB from one equal process to the next.
    ctypes.CDLL(None).malloc_trim(0)
    EventPipe(events_fd).send({"resident_bytes": resident_bytes()})


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    raise OSError("memory is read from VmRSS in /proc/self/status, which has no such line; run this on Linux")
