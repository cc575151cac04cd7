"""Blocks of the KV cache that must be zeroed before another request uses them.

A request that writes may fill its blocks with NaN or infinity, and attention kernels multiply the unused end
of a block by zero: the next request that gets the block would be corrupted. Blocks that the prefix cache
gives to a request with the same writes keep their content.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.output import SchedulerOutput


class UncleanBlocks:
    """Ids of blocks that requests with writes have held since the blocks were last zeroed."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._writers: set[str] = set()

    def watch(self, request_id: str) -> None:
        self._writers.add(request_id)

    def among(self, allocated: Iterable[int]) -> list[int]:
        """Return the newly allocated blocks that the worker must zero, and mark them clean."""
        unclean = self._ids.intersection(allocated) if self._ids else set()
        self._ids -= unclean
        return sorted(unclean)

    def note(self, output: SchedulerOutput) -> None:
        if not self._writers:
            return
        for new in output.scheduled_new_reqs:
            if new.req_id in self._writers:
                self._ids.update(*new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and request_id in self._writers:
                self._ids.update(*blocks)
        self._writers -= output.finished_req_ids
