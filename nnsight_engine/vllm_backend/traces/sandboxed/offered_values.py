"""Values that the worker offers to a sandbox process, and the changes that the process makes to them.

The process gets and changes only the rows of its own requests; its changes are hostile until checked here.
They are stored for the case that the step is run again, since the process is asked only once. The size of its
answers is up to the untrusted code, so no more is stored than one message may hold, and a step in which more
was changed cannot be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnsight_engine.core.trees import tensors
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization.message import Piece
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.messages import Tensors, ValueSlot, packed_value
from nnsight_engine.vllm_backend.traces.row_payloads import RowPayloads, RowStore
from nnsight_engine.vllm_backend.traces.rows import RowSpan


def packed_rows(
    provider: str, value: Any, payloads: RowPayloads
) -> tuple[list[ValueSlot] | None, bool, Sequence[Piece]]:
    """Return the process's rows of a value: slots, whether it is a tuple, and bytes, see ``packed_value``.

    SandboxedError if the value cannot be sent, or has a tensor that belongs to other traces too.
    """
    try:
        own_rows, forms = payloads.pack(RowStore().keep(value))
        is_shared = not payloads.is_all and any(axis < 0 for axis, _ in forms)
        if not is_shared:
            return packed_value(own_rows)
    except Exception as error:
        raise SandboxedError.unsendable(provider, error) from error
    raise SandboxedError.shared(provider)


def put_changes(
    place: RowSpan, payloads: RowPayloads, slots: Sequence[ValueSlot], content: memoryview
) -> None:
    """Apply the changes of a process to the value at hand; SandboxEndedError if they are invalid."""
    keeper = RowStore()
    try:
        sendable = keeper.keep(place.value)
        place.value = keeper.give_back(_changed(place, payloads, sendable, slots, content))
    except SandboxEndedError:
        raise
    except Exception as error:  # no number that a process sends may end the model
        raise SandboxEndedError.broken(f"it changed a value, but {error}") from error


def _changed(
    place: RowSpan, payloads: RowPayloads, value: Any, slots: Sequence[ValueSlot], content: memoryview
) -> Any:
    """Return the value with the process's rows; SandboxEndedError if a slot or its rows are invalid."""
    received, before = Tensors(content), list(tensors(value))
    changes: dict[int, torch.Tensor] = {}
    for slot in slots:
        rows = received.next(slot)
        if not 0 <= slot.number < len(before) or slot.number in changes:
            raise SandboxEndedError.broken("it changed a value that there is not")
        if tuple(rows.shape) != payloads.shape_of(before[slot.number]):
            raise SandboxEndedError.broken("it changed rows that are not its own")
        if not before[slot.number].is_floating_point():
            place.check(rows.to(before[slot.number].dtype))
        changes[slot.number] = rows
    received.check_end()
    with torch.inference_mode():
        changed = payloads.changed(value, list(changes.items()))
    # Blocks of this worker that edit their copies later write into the new tensors.
    for old, new in zip(before, list(tensors(changed)), strict=True):
        for copy in place.copies:
            if copy.whole is old:
                copy.whole = new
    return changed


class Changes:
    """Slots and bytes by place; none are kept (``is_too_much``) over the limit or after a repeated place."""

    def __init__(self, max_bytes: int) -> None:
        self.by_place: dict[str, tuple[Sequence[ValueSlot], memoryview]] = {}
        self.is_too_much = False
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def keep(self, place: str, slots: Sequence[ValueSlot], content: memoryview) -> None:
        """Store the changes made at a place; drop all over the limit, or if the place has some already."""
        self._num_bytes += len(content)
        self.is_too_much = self.is_too_much or self._num_bytes > self._max_bytes or place in self.by_place
        if self.is_too_much:
            self.by_place.clear()
        else:
            self.by_place[place] = (slots, content)

    def clear(self) -> None:
        self.by_place.clear()
        self.is_too_much, self._num_bytes = False, 0
