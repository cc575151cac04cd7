from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

PENDING: Final = "pending"
"""Result of a worker whose task is not done; the worker continues with other requests meanwhile."""

T = TypeVar("T")


def answer(answers: Sequence[T]) -> T:
    """Return the workers' common result: all are equal, or only one worker returned a value."""
    return next((one for one in answers if one), answers[0])
