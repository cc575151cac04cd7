"""What vLLM's workers say to a call, as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

PENDING: Final = "pending"
"""What a worker answers that is not done yet, and goes on with others meanwhile."""

T = TypeVar("T")


def answer(answers: Sequence[T]) -> T:
    """Return what workers said to a call: all the same, or only one of them has anything to say."""
    return next((one for one in answers if one), answers[0])
