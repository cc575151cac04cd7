"""What a job's blocks print, as far as it is kept: it lies in the database, which has to stay small.

A run asks for each line before it is written. Lines count among the bytes of jobs, so that whoever prints
much has less room for results, and a disk is not filled with what no limit knows of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from api_schemas.errors import ApiError
from api_schemas.jobs import JobEvent
from app.storage.job_states import size_of
from app.storage.job_storage_quota import JobStorageQuota
from app.storage.storage_usage import Holder

_MAX_LINES: Final = 10_000
_MAX_CHARS: Final = 16 * 2**20
_NOT_KEPT: Final = "… (what the block prints from here on is not kept{why})"


class JobPrints:
    """The room that the events of one run take.

    Args:
        space: Counts them.
        holder: Whose they are.
    """

    def __init__(self, space: JobStorageQuota, holder: Holder) -> None:
        """Begin without any."""
        self._space = space
        self._holder = holder
        self._num_lines = 0
        self._num_chars = 0
        self._num_taken = 0
        self._is_full = False

    def admit(self, event: JobEvent) -> bool:
        """Return whether a printed line is written down; the first one that has no room says so instead."""
        if self._is_full:
            return False
        self._num_lines += 1
        self._num_chars += len(event.message or "")
        if self._num_lines > _MAX_LINES or self._num_chars > _MAX_CHARS:
            self._end_with(event)
            return True
        num_bytes = size_of([event])
        try:
            self._space.take(num_bytes, self._holder)
        except ApiError as error:
            self._end_with(event, f": {error.message}")
        else:
            self._num_taken += num_bytes
        return True

    def _end_with(self, event: JobEvent, why: str = "") -> None:
        self._is_full = True
        event.message = _NOT_KEPT.format(why=why)

    def written(self, events: Sequence[JobEvent]) -> None:
        """Count events as stored, lines and others: the database has them."""
        num_bytes = size_of(events)
        self._give_up(min(num_bytes, self._num_taken))
        self._space.add(num_bytes, self._holder)

    def close(self) -> None:
        """Give up the room of what was never written; harmless when repeated."""
        self._give_up(self._num_taken)

    def _give_up(self, num_bytes: int) -> None:
        self._num_taken -= num_bytes
        self._space.give_up(num_bytes, self._holder)


__all__ = ["JobPrints"]
