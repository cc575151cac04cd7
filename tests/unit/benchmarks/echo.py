"""A child process that answers requests, and fails on request."""

from __future__ import annotations

import sys

from benchmarks.process import EventPipe, events_fd


def answer(value: int) -> list[str | int]:
    if value < 0:
        raise ValueError(f"{value} is negative")
    return [*arguments, value]


if __name__ == "__main__":
    arguments, fd = events_fd(sys.argv)
    EventPipe(fd).serve(answer)
