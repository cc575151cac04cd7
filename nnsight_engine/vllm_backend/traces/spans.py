"""A request's rows in steps: prompts in chunks, and positions that are computed again.

A block expects the whole prompt at once. Of a prompt in chunks, the first place that the block requests is
gathered: each chunk's rows are stored, and the last chunk completes the value; a value assigned there is
applied chunk by chunk. By then the earlier chunks have passed all other places, so a request for another
place, or an edit of the gathered value, is a ``ChunkedPromptError``.

After a preemption the block does not run again for positions that it has seen; its stored writes are
replayed, or the rebuilt keys and values would be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.trees import map_pairs, map_tensors, tensors
from nnsight_engine.interleaving.events import Events
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError
from nnsight_engine.vllm_backend.traces.memory_accounting import num_bytes

if TYPE_CHECKING:
    from nnsight_engine.interleaving.mediator import Mediator
    from nnsight_engine.vllm_backend.traces.request import TracedRequest


class PromptChunks:
    """The gathered values of one prompt's chunks; ``num_passed`` counts them, and is 0 after the last."""

    def __init__(self, request: TracedRequest) -> None:
        self.num_passed = 0
        self._request = request
        self._gathered: dict[tuple[Mediator, str], list[Any]] = {}  # chunks by block and provider
        self._delivered: list[tuple[Any, list[tuple[int, int]]]] = []  # whole values and ``_versions``
        self._answered: set[tuple[Mediator, str]] = set()  # the blocks and providers of whole values

    def clear(self) -> None:
        """Drop what is gathered: the prompt is complete, or its request has ended."""
        self.num_passed = 0
        self._request.memory.keep("chunks", -num_bytes(self._gathered.values()))
        self._gathered.clear()
        self._answered.clear()

    def serve_part(self, provider: str) -> None:
        """Gather rows for reads, or apply this chunk's share of writes; the blocks continue to wait."""
        request, batcher = self._request, self._request.batcher
        for mediator in request.waiting_for(provider):
            kind, _, _, new_value = mediator.waiting or (None, None, None, None)
            gathered = self._gathered.setdefault((mediator, provider), [])
            if len(gathered) != self.num_passed:
                continue  # an earlier chunk has passed this place; the last chunk raises it in the block
            gathered.append(batcher.narrow(batcher.group))
            request.memory.keep("chunks", num_bytes(gathered[-1:]))
            if kind is Events.SWAP:
                batcher.swap(batcher.group, self._share_of(new_value))

    def serve_last(self, provider: str) -> None:
        """At the last chunk, give the first waiting block the whole value, or apply what it assigned.

        The block gets a ChunkedPromptError if the earlier chunks were not gathered at this place.
        """
        request, batcher = self._request, self._request.batcher
        mediator = request.waiting_for(provider)[0]
        place = (mediator, provider)
        kind, _, _, new_value = mediator.waiting or (None, None, None, None)
        gathered = self._gathered.get(place, ())
        if len(gathered) != self.num_passed:
            mediator.fail(ChunkedPromptError.reading(provider, self.num_passed + 1))
        elif kind is Events.SWAP and place not in self._answered:
            request.memory.keep("chunks", -num_bytes(self._gathered.pop(place)))
            self._swap_last(mediator, new_value)
        elif kind is Events.VALUE:
            whole = batcher.narrow(batcher.group)
            for part in reversed(gathered):
                whole = map_pairs(part, whole, joined)
            self._answered.add(place)
            self._delivered.append((whole, _versions(whole)))
            mediator.respond(whole)
        else:
            mediator.fail(ChunkedPromptError.writing(provider, self.num_passed + 1))

    def check_unedited(self, provider: str) -> None:
        """When the model continues, raise ChunkedPromptError if the block has edited a gathered value."""
        delivered, self._delivered = self._delivered, []
        for whole, before in delivered:
            self._request.memory.count_given(num_bytes([whole]))
            if _versions(whole) != before:
                raise ChunkedPromptError.writing(provider, self.num_passed + 1)

    def _swap_last(self, mediator: Mediator, value: Any) -> None:
        """Apply the last chunk's share of a value that the block assigned, and answer the block."""
        batcher = self._request.batcher
        try:
            batcher.swap(batcher.group, self._share_of(value, is_last=True))
        except ValueError as error:
            mediator.fail(error)
        else:
            mediator.respond()

    def _share_of(self, value: Any, *, is_last: bool = False) -> Any:
        """Return this chunk's rows of a value assigned to the whole prompt; ValueError if it has others."""
        batcher = self._request.batcher
        start, stop = self._request.start, self._request.start + self._request.num_new

        def share(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            axis = batcher.axis(whole)
            if axis is None or part.ndim <= axis:
                return part
            if is_last and part.shape[axis] != stop:
                raise ValueError(
                    f"this request's prompt has {stop} positions, so the value must have as many rows, got a "
                    f"tensor of shape {tuple(part.shape)}"
                )
            return part[(slice(None),) * axis + (slice(start, stop),)]

        return map_pairs(batcher.current_value, value, share)


def joined(earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """Return the rows of two chunks as one tensor, which may have a batch axis of 1 before its rows."""
    if earlier.ndim != later.ndim or not earlier.ndim:
        return earlier
    axis = 1 if earlier.ndim > 1 and earlier.shape[0] == 1 and later.shape[0] == 1 else 0
    with torch.inference_mode(mode=False):
        return torch.cat([earlier, later], dim=axis)


def _versions(value: Any) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in tensors(value)]  # noqa: SLF001 - has no public name


_WRITES: Final = "writes"
"""Name of the writes' account in ``MemoryAccount``."""


class ReplayedWrites:
    """What the blocks of a request have written, replayed when positions are computed again."""

    def __init__(self, request: TracedRequest) -> None:
        self._request = request
        self._written: dict[str, list[tuple[int, Any]]] = {}  # first positions and rows, by provider
        self._recomputed: tuple[int, int, int] | None = None  # as given to ``begin_step``

    def begin_step(self, row: int, start: int, num_rows: int) -> None:
        """Begin a step that recomputes ``num_rows`` positions from ``start`` on, in rows from ``row`` on."""
        self._recomputed = (row, start, num_rows) if num_rows else None
        for provider in self._written if num_rows else ():
            self._request.dispatcher.want(provider, self._request)

    def end_step(self) -> None:
        """End a step; places that were wanted only for replays are not wanted any more."""
        if self._recomputed is not None:
            self._recomputed = None
            for provider in self._written:
                self._request.release(provider)

    def clear(self) -> None:
        """Drop all writes: no position will be computed again."""
        self._written.clear()
        self._request.memory.release_account(_WRITES)

    def has_use_for(self, provider: str) -> bool:
        return self._recomputed is not None and provider in self._written

    def put_back(self, provider: str) -> None:
        """Replay the writes at a place, if this step recomputes positions that the block has seen."""
        if self._recomputed is None or provider not in self._written:
            return
        row, start, num_rows = self._recomputed
        batcher = self._request.batcher
        value = batcher.current_value
        for position, rows in self._written[provider]:
            value = self._with(value, rows, row + position - start, start, num_rows, position)
        batcher.current_value = value

    def _with(self, value: Any, rows: Any, row: int, start: int, num_rows: int, position: int) -> Any:
        """Return ``value`` with the ``rows`` written from ``position`` on, as far as they are recomputed.

        This step recomputes ``num_rows`` positions from ``start`` on; ``row`` is where ``position`` would lie
        in the batch.
        """

        def put_part(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            axis = self._request.batcher.axis(whole)
            if axis is None:
                return whole
            num_before = max(start - position, 0)
            length = min(part.shape[axis], start + num_rows - position) - num_before
            if length <= 0:
                return whole
            written = whole.clone()
            written.narrow(axis, row + num_before, length).copy_(part.narrow(axis, num_before, length))
            return written

        return map_pairs(value, rows, put_part)

    def note(self, provider: str) -> None:
        """Store the request's rows of the value at hand, which a block has changed, to replay them."""
        request, batcher = self._request, self._request.batcher
        first_row, num_rows = batcher.group

        def copied_rows(tensor: torch.Tensor) -> torch.Tensor:
            axis = batcher.axis(tensor)
            return tensor if axis is None else tensor.narrow(axis, first_row, num_rows).clone()

        entries = self._written.setdefault(provider, [])
        if entries and entries[-1][0] == request.start:
            request.memory.keep(_WRITES, -num_bytes([entries.pop()[1]]))
        written = map_tensors(batcher.current_value, copied_rows)
        entries.append((request.start, written))
        request.memory.keep(_WRITES, num_bytes([written]))
