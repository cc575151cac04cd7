"""Limits on the prints of a job's blocks, which are stored in the database.

A run asks for admission of each line before it is written. Lines count against the storage limits of jobs, so
a job that prints much leaves less room for results, and prints cannot fill the disk beyond the limits.
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
    """The storage reserved for the events of one run.

    Args:
        space: Counts the bytes.
        holder: The tenant and key that own them.
    """

    def __init__(self, space: JobStorageQuota, holder: Holder) -> None:
        self._space = space
        self._holder = holder
        self._num_lines = 0
        self._num_chars = 0
        self._num_taken = 0
        self._is_full = False

    def admit(self, event: JobEvent) -> bool:
        """Return whether a printed line is written; the first line beyond a limit becomes a notice."""
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
        """Count events that are in the database as stored, prints and others."""
        num_bytes = size_of(events)
        self._give_up(min(num_bytes, self._num_taken))
        self._space.add(num_bytes, self._holder)

    def close(self) -> None:
        """Release the reservation of lines that were not written; idempotent."""
        self._give_up(self._num_taken)

    def _give_up(self, num_bytes: int) -> None:
        self._num_taken -= num_bytes
        self._space.give_up(num_bytes, self._holder)


__all__ = ["JobPrints"]
