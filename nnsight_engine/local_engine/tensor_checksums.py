"""What is in a model's tensors, told from one moment to another by sums of their bytes.

A second copy of the weights would cost as much memory as the model; torch's own counters of writes miss those
through ``.data``. So each tensor's bytes are added up as 64-bit numbers, by rows and by columns of a table:
one byte that is another one changes both sums, and rows that trade places change the former. It costs two
reads of the memory. Small tensors that are no weights, which a model may write to itself, are kept and put
back. ``model_snapshot`` calls this between two traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_WORD_BYTES = 8
_NUM_COLUMNS = 256
_MAX_KEPT_BYTES = 2**20
"""Of a tensor that is copied, so that it can be put back."""


class TensorChecksums:
    """The tensors of a model, and what was in them.

    Args:
        tensors: The tensors; none of them is to be a placeholder.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of them."""
        self._tensors = [_Known(one) for one in tensors]
        self._summed = [one for one in self._tensors if one.kept is None]
        self._sums = self._now()

    @property
    def is_written(self) -> bool:
        """Whether torch says that a weight was written to since the last look; costs nothing."""
        return sum(one.is_written() for one in self._summed) > 0

    def restore(self) -> bool:
        """Put back what can be; False if the tensors do not hold what they held."""
        if not all(one.tensor.is_leaf for one in self._tensors):
            return False  # a graph stands behind one
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


class _Known:
    """A tensor as it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._memory = tensor.detach()  # and it stays allocated
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
    """Compare bytes, since what is no number equals nothing."""
    return torch.equal(
        one.reshape(-1).contiguous().view(torch.uint8), other.reshape(-1).contiguous().view(torch.uint8)
    )


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that have memory, of one that may be made of others."""
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
