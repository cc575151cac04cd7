"""Blocks of the KV cache that must be zeroed before another request uses them.

A request that writes into the model may fill its blocks with NaN or infinity. Attention kernels weigh the
unused end of a block with zero, and zero times NaN is NaN: left as it is, such a block makes wrong tokens for
whichever request gets it next, without an intervention of its own. vLLM zeroes blocks where a model needs it;
here the same is asked for the blocks of such requests alone, as they are allocated again. Blocks that the
prefix cache gives to a request with the same writes keep their content.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.output import SchedulerOutput


class UncleanBlocks:
    """Ids of blocks that requests with writes have held since the blocks were last zeroed."""

    def __init__(self) -> None:
        """Start with all blocks as vLLM made them."""
        self._ids: set[int] = set()
        self._writers: set[str] = set()

    def watch(self, request_id: str) -> None:
        """Count all blocks of a new request as unclean."""
        self._writers.add(request_id)

    def among(self, allocated: Iterable[int]) -> list[int]:
        """Return the blocks among those just allocated that the worker has to zero."""
        unclean = self._ids.intersection(allocated) if self._ids else set()
        self._ids -= unclean
        return sorted(unclean)

    def note(self, output: SchedulerOutput) -> None:
        """Add the blocks that a step gives to watched requests."""
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
