"""Payloads of values sent between stages: only the rows of traced requests, not those of other requests.

The receiver puts the rows at their positions in the step, in tensors that are otherwise zero, so that a value
has the same form as on the sender's side. Its changes are sent back as rows, and only those are replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.vllm_backend.traces.rows import plain, row_axis

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.request import TraceSpan

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
"""Types that are sent as they are, beside tensors; subclasses may be unknown to the other side."""

Form = tuple[int, bool]
"""The form of a tensor: the axis of its rows (-1 for none), and whether it is on the host."""

Change = tuple[int, torch.Tensor]
"""A change of a value: the number of a tensor in it, and the rows that replace the tensor's."""


class RowPayloads:
    """Takes the rows of some requests out of a step's values, and puts changed ones back.

    ``num_rows`` is the number of the step's rows, over all requests.
    """

    def __init__(self, spans: Sequence[TraceSpan], num_rows: int) -> None:
        ranges = [torch.arange(span.row, span.row + span.num_rows) for span in spans]
        self._index = torch.cat(ranges) if ranges else torch.arange(0)
        self._num_rows = num_rows
        self._is_whole = torch.equal(self._index, torch.arange(num_rows))

    @property
    def is_all(self) -> bool:
        """Whether all rows of the step belong to these requests, in whatever order."""
        return len(self._index) == self._num_rows

    def shape_of(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Return the shape of the requests' rows of a tensor; None if it has no rows of single requests."""
        axis = row_axis(tensor, self._num_rows)
        if axis is None:
            return None
        return (*tensor.shape[:axis], len(self._index), *tensor.shape[axis + 1 :])

    def pack(self, value: Any) -> tuple[Any, list[Form]]:
        """Return the requests' rows of a value, on the host, and the forms of its tensors, for ``unpack``."""
        forms: list[Form] = []

        def packed(tensor: torch.Tensor) -> torch.Tensor:
            axis = row_axis(tensor, self._num_rows)
            forms.append((-1 if axis is None else axis, tensor.device.type == "cpu"))
            return self._rows(tensor, axis)

        return map_tensors(value, packed), forms

    def unpack(self, value: Any, forms: Sequence[Form], device: torch.device) -> Any:
        """Return a packed value in its original form, with zeros in place of other requests' rows."""
        expected = iter(forms)

        def unpacked(tensor: torch.Tensor) -> torch.Tensor:
            axis, on_host = next(expected)
            tensor = tensor if on_host else tensor.to(device)
            if axis < 0 or self._is_whole:
                return tensor
            whole = tensor.new_zeros((*tensor.shape[:axis], self._num_rows, *tensor.shape[axis + 1 :]))
            return whole.index_copy_(axis, self._index.to(whole.device), tensor)

        return map_tensors(value, unpacked)

    def changes(self, before: Any, after: Any) -> list[Change]:
        """Return the requests' rows of each tensor that is another object in ``after`` than in ``before``."""
        return [
            (number, self._rows(new, row_axis(new, self._num_rows)))
            for number, (old, new) in enumerate(zip(tensors(before), tensors(after), strict=True))
            if old is not new
        ]

    def changed(self, value: Any, changes: Sequence[Change]) -> Any:
        """Return the value with changes applied; rows of other requests stay unchanged, bit by bit."""
        if not changes:
            return value
        rows, numbers = dict(changes), itertools.count()

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            part = rows.get(next(numbers))
            axis = row_axis(tensor, self._num_rows)
            if part is None or axis is None:
                return tensor
            index = self._index.to(tensor.device)
            return tensor.clone().index_copy_(axis, index, part.to(tensor))

        return map_tensors(value, replaced)

    def _rows(self, tensor: torch.Tensor, axis: int | None) -> torch.Tensor:
        tensor = plain(tensor)
        if axis is None or self._is_whole:
            return tensor.cpu()
        return tensor.index_select(axis, self._index.to(tensor.device)).cpu()


class RowsPlaceholder:
    """A placeholder, in a value that is sent, for an object that stays on the sender's side."""

    __slots__ = ("name", "value")

    def __init__(self, value: Any, number: int) -> None:
        self.value = value
        kind = value.name[1] if isinstance(value, RemoteValue) else type(value).__qualname__
        self.name = (str(number), kind)

    @staticmethod
    def reference(value: Any) -> tuple[str, ...] | None:
        return value.name if isinstance(value, RowsPlaceholder) else None


class RowStore:
    """The objects that stay on this stage while other stages refer to them by name."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def keep(self, value: Any) -> Any:
        """Return a value in which all objects that cannot be sent are replaced by ``RowsPlaceholder``."""
        if type(value) in _PLAIN or isinstance(value, torch.Tensor):
            return value
        if type(value) is dict and all(type(key) in _PLAIN for key in value):
            return {key: self.keep(item) for key, item in value.items()}
        if type(value) in {tuple, list}:
            return type(value)(self.keep(item) for item in value)
        self._objects.append(value)
        return RowsPlaceholder(value, len(self._objects) - 1)

    def give_back(self, value: Any) -> Any:
        """Return a value of ``keep`` with the objects themselves in place of their placeholders."""
        if isinstance(value, RowsPlaceholder):
            return value.value
        if type(value) is dict:
            return {key: self.give_back(item) for key, item in value.items()}
        if type(value) in {tuple, list}:
            return type(value)(self.give_back(item) for item in value)
        return value

    def resolve(self, name: tuple[str, ...]) -> Any:
        return self._objects[int(name[0])]

    @staticmethod
    def refusal(value: Any) -> str | None:
        """Return the name of a type in a value that cannot be sent to another stage; else None."""
        if type(value) in _PLAIN or isinstance(value, torch.Tensor | RemoteValue):
            return None
        if type(value) is dict:
            return next(filter(None, map(RowStore.refusal, [*value, *value.values()])), None)
        if type(value) in {tuple, list}:
            return next(filter(None, map(RowStore.refusal, value)), None)
        return type(value).__qualname__

    def clear(self) -> None:
        """Drop all objects: their names are valid for one step only."""
        self._objects.clear()


class RemoteValue:
    """A placeholder, where blocks run, for an object that stays at ``place``; any use raises the error."""

    def __init__(self, name: tuple[str, ...], place: str, refusal: Callable[[str], Exception]) -> None:
        self.name = name
        self._place = place
        self._refusal = refusal

    def __getattr__(self, name: str) -> Any:
        """Raise the error; AttributeError for special names, which Python itself looks up."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal(self.name[1])

    def __repr__(self) -> str:
        return f"<{self.name[1]} {self._place}>"

    @staticmethod
    def reference(value: Any) -> tuple[str, ...] | None:
        return value.name if isinstance(value, RemoteValue) else None
