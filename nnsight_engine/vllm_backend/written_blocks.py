"""Blocks of the KV cache that requests with writes have filled, and that others must not get as they are.

vLLM publishes a block in the prefix cache when it schedules it. If a write then fails, requests with equal
writes may hold keys and values without it: the blocks are evicted, and these requests fail as well, also
after the writer has ended.

A request that writes may fill its blocks with NaN or infinity, and attention kernels multiply the unused end
of a block by zero: the next request that gets the block would be corrupted. So it is zeroed before; blocks
that the prefix cache gives to a request with the same writes keep their content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput

from nnsight_engine.plans.records import Failure

_READ_FAILURES: Final = frozenset({"capture_too_large", "engine_capture_full"})
"""Failures that concern reads only: all writes of the request took place."""
_MESSAGE: Final = "the keys and values it shared with a failed request are incomplete; send it again"


@dataclasses.dataclass(slots=True)
class EndedWriter:
    """A request that ended with steps under way, any of which may fail; ``hashes`` tell reused blocks."""

    hashes: dict[int, Any]
    num_steps: int


class SharedBlocks:
    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._writers: set[str] = set()
        self._ended: dict[str, EndedWriter] = {}

    def add(self, request_id: str) -> None:
        self._writers.add(request_id)

    def discard(self, request_id: str) -> None:
        self._writers.discard(request_id)

    def keep(self, request_ids: Iterable[str] | None, num_steps: int) -> None:
        """Remember the blocks of requests about to be released (None: of all) while steps are under way."""
        if not num_steps:
            return
        for request_id in self._writers if request_ids is None else self._writers.intersection(request_ids):
            hashes = {block: self._hash_of(block) for block in self._blocks(request_id)}
            cached = {block: hash_ for block, hash_ in hashes.items() if hash_ is not None}
            if cached:
                self._ended[request_id] = EndedWriter(cached, num_steps)

    def end_step(self) -> None:
        """Count a step of each ended writer; after the last one it can no longer fail."""
        for request_id, writer in list(self._ended.items()):
            writer.num_steps -= 1
            if writer.num_steps <= 0:
                del self._ended[request_id]

    def evict(self, failures: dict[str, Failure]) -> set[int]:
        """Evict and return the blocks of failed requests; adds the failures of requests that share them."""
        self._fail_sharers(failures)
        spoiled = {block for request_id in failures for block in self._blocks(request_id)}
        if spoiled:
            self._manager.evict_blocks(spoiled)
        for request_id in failures:
            self._ended.pop(request_id, None)  # other requests may have its blocks now
        return spoiled

    def _fail_sharers(self, failures: dict[str, Failure]) -> None:
        """Add a failure for writers that share blocks with a failed one, and for those that share theirs."""
        spoiled = [
            request_id
            for request_id, failure in failures.items()
            if failure.code not in _READ_FAILURES
            and (request_id in self._writers or request_id in self._ended)
        ]
        while spoiled:
            blocks = self._blocks(spoiled.pop())
            for request_id in self._writers - failures.keys():
                if blocks & self._blocks(request_id):
                    failures[request_id] = Failure("intervention_failed", _MESSAGE)
                    spoiled.append(request_id)

    def _blocks(self, request_id: str) -> set[int]:
        """Return a request's blocks; of an ended writer, those that no other content has replaced."""
        if request_id in self._ended:
            hashes = self._ended[request_id].hashes
            return {block for block, hash_ in hashes.items() if self._hash_of(block) == hash_}
        # A request without blocks, or one that has ended, has none here.
        return {block for group in self._manager.get_block_ids(request_id) for block in group}

    def _hash_of(self, block: int) -> Any:
        return self._manager.block_pool.blocks[block].block_hash


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
        """Record the blocks that a scheduled step gives to requests with writes."""
        if not self._writers:
            return
        for request in output.scheduled_new_reqs:
            if request.req_id in self._writers:
                self._ids.update(*request.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and request_id in self._writers:
                self._ids.update(*blocks)
        self._writers -= output.finished_req_ids
