"""Values that the worker offers to a sandbox process, and the changes that the process makes to them.

The process gets and changes only the rows of its own requests; its changes are hostile until checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnsight_engine.core.trees import tensors
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization.message.table import Piece
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.messages import Tensors, ValueSlot, packed_value
from nnsight_engine.vllm_backend.traces.row_payloads import RowPayloads, RowStore
from nnsight_engine.vllm_backend.traces.rows import RowSpan


def packed_rows(
    provider: str, value: Any, payloads: RowPayloads
) -> tuple[list[ValueSlot] | None, bool, Sequence[Piece]]:
    """Return the process's rows, see ``packed_value``; SandboxedError if one trace cannot have the value."""
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
        kept = keeper.keep(place.value)
        place.value = keeper.give_back(_changed(place, payloads, kept, slots, content))
    except SandboxEndedError:
        raise
    except Exception as error:  # no number that a process sends may end the model
        raise SandboxEndedError.broken(f"it changed a value, but {error}") from error


def _changed(
    place: RowSpan, payloads: RowPayloads, value: Any, slots: Sequence[ValueSlot], content: memoryview
) -> Any:
    given, before = Tensors(content), list(tensors(value))
    changes: dict[int, torch.Tensor] = {}
    for slot in slots:
        rows = given.next(slot)
        if not 0 <= slot.number < len(before) or slot.number in changes:
            raise SandboxEndedError.broken("it changed a value that there is not")
        if tuple(rows.shape) != payloads.shape_of(before[slot.number]):
            raise SandboxEndedError.broken("it changed rows that are not its own")
        if not before[slot.number].is_floating_point():
            place.check(rows.to(before[slot.number].dtype))
        changes[slot.number] = rows
    given.end()
    with torch.inference_mode():
        changed = payloads.changed(value, list(changes.items()))
    for old, new in zip(before, list(tensors(changed)), strict=True):
        for copy in place.copies:
            if copy.whole is old:
                copy.whole = new
    return changed


__all__ = ["packed_rows", "put_changes"]
