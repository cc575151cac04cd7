"""Slicing and replacement of one request's rows in the flat tensors of a step.

vLLM concatenates the tokens of all requests, ``[tokens, width]``; behind the model there is one row per
request, ``[requests, vocabulary]``. A block receives *copies*, because vLLM's kernels later write into the
tensors that modules return. Edits are written back when the block hands over, in a new tensor in which the
rows of all other requests are unchanged, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nnsight_engine.core.tensors import fitted
from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.interleaving.batching import Batcher, BatchGroup, Loans, check_written
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a plain ``torch.Tensor``: a subclass would intercept all later operations."""
    if type(tensor) is torch.Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - has no public name
        return tensor.detach().as_subclass(torch.Tensor)


def zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of a tensor's shape and dtype without allocating them (expanded from one element)."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


class RowSpan:
    """The place that the model has reached, and the value there, for all requests of the step.

    A block may edit its copy until the model continues, also after other requests have been served (it may
    wait for one at a barrier). So all requests share one value, and replaced rows go into the tensors that
    other copies refer to. ``tokens`` are the places whose integers blocks can change, token ids and experts,
    each with their number.
    """

    __slots__ = ("copies", "provider", "tokens", "value")

    def __init__(self) -> None:
        self.provider = ""
        self.value: Any = None
        self.copies: list[_Copy] = []
        self.tokens: Mapping[str, int] = {}

    def enter(self, provider: str, value: Any) -> None:
        self.provider, self.value = provider, value

    def leave(self) -> Any:
        value, self.value = self.value, None
        self.copies.clear()
        return value

    def check(self, rows: torch.Tensor) -> None:
        """Raise ValueError for integers that blocks cannot change, or that are out of range.

        Kernels use positions, token ids and experts as indices unchecked: they would read out of bounds, or
        crash.
        """
        if rows.is_floating_point() or rows.is_complex():
            return
        num_tokens = self.tokens.get(self.provider)
        if num_tokens is None:
            raise ValueError(
                f"`{self.provider}` holds integers that vLLM's kernels trust, such as positions, so no block "
                "can change them; of integers only tokens can be, `samples.output` and the embedding's "
                "input, and the chosen experts, `moe.experts`, of models that can be given others"
            )
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < num_tokens):
            raise ValueError(
                f"`{self.provider}` takes integers from 0 to {num_tokens - 1}, and was given others: "
                f"{int(rows.min())} to {int(rows.max())}"
            )


def row_axis(tensor: torch.Tensor, num_rows: int) -> int | None:
    """Return the axis of a tensor's rows, or None; vLLM's Transformers backend has a first axis of size 1."""
    if tensor.ndim and tensor.shape[0] == num_rows:
        return 0
    if tensor.ndim > 1 and tensor.shape[0] == 1 and tensor.shape[1] == num_rows:
        return 1
    return None


class _Copy:
    """A copy of rows, with the tensor it was copied from and its version counter at that time."""

    __slots__ = ("rows", "version", "whole")

    def __init__(self, whole: torch.Tensor, rows: torch.Tensor) -> None:
        self.whole = whole
        self.rows = rows
        self.version = rows._version  # noqa: SLF001 - has no public name


class _Computed:
    """A tensor that was computed for the block, and what replaces the model's value if the block edits it.

    One that was only read changes nothing: the model's value stays, bit by bit.
    """

    __slots__ = ("name", "replacement", "value", "version")

    def __init__(self, name: str, value: torch.Tensor, replacement: Any) -> None:
        self.name = name
        self.value = value
        self.replacement = replacement
        self.version = value._version  # noqa: SLF001 - has no public name


class _Copies(Loans):
    __slots__ = ("computed", "copies")

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[_Copy] = []
        self.computed: list[_Computed] = []


class FlatBatcher(Batcher):
    """The rows of one request; the block has ``changed`` the value since this was last set to False."""

    def __init__(self, place: RowSpan) -> None:
        self._place = place
        super().__init__()
        self.changed = False

    @property
    def current_value(self) -> Any:
        return self._place.value

    @current_value.setter
    def current_value(self, value: Any) -> None:
        self._place.value = value

    def set_num_rows(self, num_rows: int) -> None:
        """Set the number of rows of tensors in this phase, over all requests."""
        self.total_batch_size = num_rows

    def covers_batch(self, group: BatchGroup | None) -> bool:  # noqa: ARG002 - a hook
        """Return False: a request gets copies of the flat tensors even if it is alone in the batch."""
        return False

    def narrow(self, group: BatchGroup | None) -> Any:  # noqa: ARG002 - a batcher has one request
        """Return the value with copies of this request's rows, which are written back if blocks edit them."""
        invoke_rows = self.group
        with torch.inference_mode(mode=False):  # blocks run outside of it, and may edit the copies
            narrowed = map_tensors(self.current_value, lambda tensor: self._rows(tensor, invoke_rows))
        if not isinstance(narrowed, torch.Tensor):
            self._lending().trees.append((narrowed, list(tensors(narrowed)), invoke_rows))
        return narrowed

    def _lending(self) -> _Copies:
        if not isinstance(self.loans, _Copies):
            self.loans = _Copies()
        return self.loans

    def _rows(self, tensor: torch.Tensor, group: BatchGroup | None) -> torch.Tensor:
        """Return a copy of the request's rows; a copy of all if the tensor has no rows of single requests."""
        axis = self.axis(tensor)
        if axis is None or group is None:
            rows = tensor.clone()
            self._lending().shared.append((rows, rows._version))  # noqa: SLF001 - has no public name
            return rows
        rows = tensor.narrow(axis, *group).clone()
        copy = _Copy(tensor, rows)
        self._lending().copies.append(copy)
        self._place.copies.append(copy)
        return rows

    def axis(self, tensor: torch.Tensor) -> int | None:
        return row_axis(tensor, self.total_batch_size)

    @property
    def lent_bytes(self) -> int:
        return sum(copy.rows.nbytes for copy in self._lending().copies) if self.loans is not None else 0

    def lend_computed(self, name: str, value: torch.Tensor, replacement: Any) -> None:
        """Replace the model's value at the point ``name`` once the block has edited ``value`` in place."""
        self._lending().computed.append(_Computed(name, value, replacement))

    def reclaim(self) -> None:
        """Write back edits after a hand-over.

        ValueError if a tensor has no rows of single requests; ChunkedPromptError if one was computed from
        rows of earlier chunks of the prompt, which have passed.
        """
        super().reclaim()
        if self.loans is None:
            return
        for copy in self._lending().copies:
            if copy.rows._version != copy.version:  # noqa: SLF001
                copy.version = copy.rows._version  # noqa: SLF001
                self._put_back(copy)
        for computed in self._lending().computed:
            if computed.value._version != computed.version:  # noqa: SLF001
                computed.version = computed.value._version  # noqa: SLF001
                num_rows = self.group[1]
                if len(computed.value) != num_rows:
                    num_chunks = -(-len(computed.value) // num_rows)  # rounded up
                    raise ChunkedPromptError.writing(computed.name, num_chunks)
                self.swap(self.group, computed.replacement)

    def _put_back(self, copy: _Copy) -> None:
        """Replace, in the value at hand, the tensor from which an edited copy was made."""
        group = self.group
        before = copy.whole

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            return self._replaced(group, tensor, copy.rows) if tensor is before else tensor

        self.current_value = map_tensors(self.current_value, replaced)

    @property
    def group(self) -> BatchGroup:
        return self.groups[0]

    @group.setter
    def group(self, group: BatchGroup) -> None:
        self.groups = [group]

    def _replaced(self, group: BatchGroup, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return ``whole`` with ``part`` as the request's rows; ValueError if blocks cannot write that."""
        axis = self.axis(whole)
        first_row, num_rows = group
        part = plain(part)
        if axis is None:
            if part.shape == whole.shape and torch.equal(part.to(whole), whole):
                return whole
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} belongs to all requests of the step together, so no "
                "block can replace it"
            )
        expected = (*whole.shape[:axis], num_rows, *whole.shape[axis + 1 :])
        if tuple(part.shape) != expected:
            raise ValueError(
                f"this request has {num_rows} row{'s' if num_rows != 1 else ''} here, so the value must be "
                f"of shape {expected}, got {tuple(part.shape)}"
            )
        part = fitted(check_written(part, whole), whole)
        if not whole.is_floating_point() and torch.equal(part, whole.narrow(axis, first_row, num_rows)):
            return whole
        self._place.check(part)
        self.changed = True
        after = self.total_batch_size - first_row - num_rows
        pieces = [whole.narrow(axis, 0, first_row), part, whole.narrow(axis, first_row + num_rows, after)]
        replaced = torch.cat(pieces, dim=axis)
        for copy in self._place.copies:
            if copy.whole is whole:
                copy.whole = replaced
        return replaced

    def settle(self) -> None:
        """Do nothing: copies are written back when the block hands over, and there are no views."""
