"""Detection of changes to a model's tensors by checksums of their bytes.

A second copy would cost as much memory as the model, and torch's version counters miss writes through
``.data``. So bytes are summed as 64-bit integers by rows and by columns; swapped rows change the order of the
row sums. Small tensors that are not weights, such as buffers that a model writes itself, are copied and
restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_WORD_BYTES = 8
_NUM_COLUMNS = 256
_MAX_KEPT_BYTES = 2**20
"""The maximum size of a tensor that is copied, so that it can be restored."""


class TensorChecksums:
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [_TensorState(one) for one in tensors]
        self._summed = [one for one in self._tensors if one.kept is None]
        self._sums = self._now()

    @property
    def is_written(self) -> bool:
        """Whether a weight was written to since the last call, by torch's version counters; cheap."""
        return sum(one.is_written() for one in self._summed) > 0

    def restore(self) -> bool:
        """Restore the copied tensors; return False if any content or graph has changed for good."""
        if not all(one.tensor.is_leaf for one in self._tensors):
            return False  # it is part of an autograd graph
        for one in self._tensors:
            one.restore()
        now = self._now()
        return len(now) == len(self._sums) and all(map(torch.equal, now, self._sums))

    def _now(self) -> list[torch.Tensor]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        seen: set[int] = set()
        for known in self._summed:
            for tensor in _plain(known.tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:  # weights may be tied
                    seen.add(storage.data_ptr())
                    by_device.setdefault(tensor.device, []).extend(_sums(storage))
        return [torch.cat(sums) for sums in by_device.values()]


class _TensorState:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._memory = tensor.detach()  # keeps it allocated
        self._needs_grad = tensor.requires_grad
        self._version = tensor._version  # noqa: SLF001 - has no public name
        is_kept = not isinstance(tensor, torch.nn.Parameter) and tensor.nbytes <= _MAX_KEPT_BYTES
        self.kept = tensor.detach().clone() if is_kept and type(tensor) is torch.Tensor else None

    def is_written(self) -> bool:
        version, self._version = self._version, self.tensor._version  # noqa: SLF001 - has no public name
        return version != self._version

    def restore(self) -> None:
        tensor, memory = self.tensor, self._memory
        if not _is_same_memory(tensor, memory):
            tensor.data = memory
        tensor.requires_grad_(self._needs_grad)
        tensor.grad = None
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name, None):
                hooks.clear()
        if self.kept is not None and not _is_equal(memory, self.kept):
            memory.copy_(self.kept)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes, since NaN equals nothing."""
    return torch.equal(
        one.reshape(-1).contiguous().view(torch.uint8), other.reshape(-1).contiguous().view(torch.uint8)
    )


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that own memory: a tensor itself, or the parts of a wrapper subclass."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        yield from _plain(getattr(tensor, name))


def _sums(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    num_rows = data.numel() // (_WORD_BYTES * _NUM_COLUMNS)
    end = num_rows * _WORD_BYTES * _NUM_COLUMNS
    table = data[:end].view(torch.int64).view(num_rows, _NUM_COLUMNS)
    return [table.sum(0), table.sum(1), data[end:].to(torch.int64)]


__all__ = ["TensorChecksums"]
