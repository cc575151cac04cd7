"""What code may use: steps of Python, bytes, bytes of saved values; counted here, for one message's code.

A step is a turn of a loop or of a comprehension, or a call of one of the code's own functions. Steps are
counted and not timed, so that the same code ends at the same place each time. Bytes are those of every
tensor, string and container made, whether it lives on or not: an upper bound of the memory in use.

What is used up stays used up: the code is stopped by ``Stop``, which is no ``Exception`` and so goes through
its ``except``; should a ``finally`` hold it up, the next step stops it again. ``told`` turns it into an error
for people where the block ends.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nnsight_engine.sandbox.restricted import names
from nnsight_engine.serialization.errors import BudgetError, FuelError, SandboxError
from nnsight_engine.tracing.sent_files import sent_name


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """What the code of one message may use.

    Attributes:
        max_steps: Turns of loops and comprehensions, and calls of functions of its own.
        max_bytes: Bytes of all tensors, arrays, strings and containers that it makes.
        max_saved_bytes: Bytes of what it saves.
    """

    max_steps: int = 10_000_000
    max_bytes: int = 64 * 2**30
    max_saved_bytes: int = 4 * 2**30


class Stop(BaseException):
    """Ends code that has used up its budget; not an ``Exception``, so that the code cannot go on.

    Attributes:
        error: What to tell.
    """

    def __init__(self, error: BudgetError) -> None:
        """Keep what to tell."""
        super().__init__(str(error))
        self.error = error


class FuelMeter:
    """What is left of a budget.

    Attributes:
        steps_left: Steps; negative once anything is used up, so that the next step stops.
        bytes_left: Bytes.
        saved_left: Bytes of saved values.
        stopped_by: What was used up first; None while all is well.
    """

    __slots__ = ("budget", "bytes_left", "saved_left", "steps_left", "stopped_by")

    def __init__(self, budget: Budget) -> None:
        """Start with all of it."""
        self.budget = budget
        self.steps_left = budget.max_steps
        self.bytes_left = budget.max_bytes
        self.saved_left = budget.max_saved_bytes
        self.stopped_by: BudgetError | None = None

    def counter(self) -> Callable[[], bool]:
        """Return what the code calls at each step; it returns True, to stand in a condition."""

        def step() -> bool:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.out_of_steps()
            return True

        return step

    def take_steps(self, num: int) -> None:
        """Count steps that were made at once, by a function that goes through a whole container."""
        self.steps_left -= num
        if self.steps_left < 0:
            self.out_of_steps()

    def out_of_steps(self) -> NoReturn:
        """Stop the code.

        Raises:
            Stop: Always.
        """
        budget = self.budget.max_steps
        self._stop(
            FuelError,
            f"the code made more than {budget:,} steps (turns of loops, calls of its functions), and may not",
            "compute on whole tensors instead of in loops",
        )

    def charge(self, num_bytes: int) -> None:
        """Count bytes, before they are used where that is known.

        Raises:
            Stop: There are not so many left.
        """
        self.bytes_left -= num_bytes
        if self.bytes_left < 0:
            self._stop(
                BudgetError,
                f"the code asked for {num_bytes:,} bytes more, in all for "
                f"{self.budget.max_bytes - self.bytes_left:,}, and may have {self.budget.max_bytes:,}",
                "work on smaller tensors, or on fewer",
            )

    def charge_saved(self, num_bytes: int) -> None:
        """Count bytes of a saved value.

        Raises:
            Stop: There are not so many left.
        """
        self.saved_left -= num_bytes
        if self.saved_left < 0:
            self._stop(
                BudgetError,
                f"the code saved more than {self.budget.max_saved_bytes:,} bytes, and may not",
                "save less: some positions, or a sum",
            )

    def told(self) -> BudgetError:
        """Return the error that tells of the stop that is being handled, at the line where that was."""
        stop = sys.exception()
        error = stop.error if isinstance(stop, Stop) else BudgetError("the code was stopped")
        return error.with_traceback(stop.__traceback__ if stop is not None else None)

    def finish(self) -> None:
        """Tell at a block's end what a ``finally`` may have kept to itself.

        Raises:
            Stop: Something was used up.
        """
        if self.stopped_by is not None:
            raise Stop(self.stopped_by)

    def _stop(self, kind: type[BudgetError], what: str, instead: str) -> NoReturn:
        if self.stopped_by is None:
            place, line = where()
            self.stopped_by = kind(f"{what}{place}; {instead}", line)
        self.steps_left = -1
        raise Stop(self.stopped_by)


def where() -> tuple[str, int | None]:
    """Return the place of the code that runs, as words that end a sentence, and its line."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - the line is in no other place
    while frame is not None and names.STEP not in frame.f_builtins:
        frame = frame.f_back
    if frame is None:
        return "", None
    return f", at line {frame.f_lineno} of {sent_name(frame.f_code.co_filename)}", frame.f_lineno


def refusal(what: str, instead: str = "") -> SandboxError:
    """Return the error that refuses something to the code that runs."""
    place, line = where()
    end = f"; {instead}" if instead else ""
    return SandboxError(
        f"{what} is not part of the sandbox's Python{place}{end} (see docs/sandbox-language.md)", line
    )
