"""An object for a child process: it answers calls, and fails at negative numbers."""

from __future__ import annotations

import time


class Echo:
    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    def answer(self, value: int) -> list[str | int]:
        if value < 0:
            raise ValueError(f"{value} is negative")
        return [*self._arguments, value]

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
