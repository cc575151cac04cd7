"""Batches in which a run creates several rows from each input row, as beam search and guidance do.

The copies of a row are adjacent; guidance repeats the whole batch, as consecutive blocks. The rows of one
block are a view. Those of several blocks are not adjacent, so an invoke gets a gathered copy, and its changes
are written back before any other invoke reads the value.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nnsight_engine.core.tensors import fitted
from nnsight_engine.core.trees import map_pairs
from nnsight_engine.interleaving.batching import Batcher, BatchGroup, Loans

Span = tuple[int, int]
"""The first row and the number of rows."""


@dataclass
class _Gathered:
    """A copy of an invoke's rows in several blocks of ``whole``; ``version``: when both were last equal."""

    whole: torch.Tensor
    spans: list[Span]
    rows: torch.Tensor
    version: int | None = None

    def collect(self) -> torch.Tensor:
        """Copy the spans of the whole into ``rows``, and return these."""
        with torch.no_grad():
            for part, span in zip(self._parts(), self.spans, strict=True):
                part.copy_(self.whole.narrow(0, *span))
        self.version = _version(self.rows)
        return self.rows

    def put_back(self) -> None:
        """Copy ``rows`` back into the whole, unless the version shows that nothing was edited."""
        if self.version is not None and self.version == _version(self.rows):
            return
        with torch.no_grad():
            for part, span in zip(self._parts(), self.spans, strict=True):
                self.whole.narrow(0, *span).copy_(part)
        self.version = _version(self.rows)

    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self.rows.chunk(len(self.spans))


class _SpreadLoans(Loans):
    __slots__ = ("gathered",)

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[_Gathered] = []


class SpreadBatcher(Batcher):
    """A batch from which the run creates one of ``copies`` rows for each, in up to ``num_blocks`` blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies: frozenset[int] = frozenset({1})
        self.num_blocks = 1

    def narrow(self, group: BatchGroup | None) -> Any:
        self._put_back()
        return self._narrow_lists(super().narrow(group), group)

    def narrow_without_state(self, group: BatchGroup | None) -> Any:
        self._put_back()
        return self._narrow_lists(super().narrow_without_state(group), group)

    def swap(self, group: BatchGroup | None, value: Any) -> None:
        self._put_back()
        super().swap(group, value)

    def _fits(self, length: int, num_rows: int) -> bool:
        """Return whether ``num_rows`` input rows can have become ``length`` rows, by blocks and copies."""
        return any(
            length == num_blocks * copies * num_rows
            for num_blocks in range(1, self.num_blocks + 1)
            for copies in self.copies
        )

    def _joined(self, parts: list[Any]) -> Any:
        """Join the invokes' values within each block, see ``_join``."""
        whole = parts[0]
        for part, (_, num_rows) in zip(parts[1:], self.groups[1:], strict=True):
            join = functools.partial(self._join, num_rows)
            whole = map_pairs(whole, part, join)
        return whole

    def _join(self, num_rows: int, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Concatenate both within each block; ``part`` was created from ``num_rows`` rows."""
        fitting = (
            num
            for num in range(1, self.num_blocks + 1)
            for copies in self.copies
            if len(part) == num * copies * num_rows
        )
        num_blocks = next(fitting, 1)
        blocks = zip(whole.chunk(num_blocks), fitted(part, whole).chunk(num_blocks), strict=True)
        return torch.cat([rows for block in blocks for rows in block])

    def settle(self) -> None:
        """Write edited copies back, then merge the views, see ``Batcher``."""
        self._put_back()
        if self.loans is not None:
            self._lending().gathered.clear()
        super().settle()

    def _lending(self) -> _SpreadLoans:
        if not isinstance(self.loans, _SpreadLoans):
            self.loans = _SpreadLoans()
        return self.loans

    def _put_back(self) -> None:
        if self.loans is not None:
            for gathered in self._lending().gathered:
                gathered.put_back()

    def _spans(self, length: int, group: BatchGroup) -> list[Span]:
        """Return an invoke's spans in ``length`` rows, one per block; none if the length fits no layout."""
        total, (first_row, num_rows) = self.total_batch_size, group
        for num_blocks in range(1, self.num_blocks + 1):
            for copies in sorted(self.copies):
                if length == num_blocks * total * copies:
                    starts = [(block * total + first_row) * copies for block in range(num_blocks)]
                    return [(start, num_rows * copies) for start in starts]
        return []

    def _rows(self, tensor: torch.Tensor, group: BatchGroup | None) -> torch.Tensor:
        """Return an invoke's rows: a view of one span, a copy of several that is put back later.

        It is the whole tensor if its length fits no layout.
        """
        if group is None or not tensor.ndim or tensor.shape[0] == self.total_batch_size:
            return super()._rows(tensor, group)
        spans = self._spans(tensor.shape[0], group)
        if not spans:
            return self._lend_whole(tensor)
        if len(spans) == 1:
            return tensor.narrow(0, *spans[0])
        for earlier_copy in self._lending().gathered:
            if earlier_copy.whole is tensor and earlier_copy.spans == spans:
                return earlier_copy.collect()
        num_rows = sum(num for _, num in spans)
        gathered = _Gathered(tensor, spans, tensor.new_empty((num_rows, *tensor.shape[1:])))
        self._lending().gathered.append(gathered)
        return gathered.collect()

    def _replaced(self, group: BatchGroup, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor with an invoke's spans replaced; ValueError if the new rows do not fit."""
        spans = self._spans(whole.shape[0], group) if whole.ndim else []
        if not spans or whole.shape[0] == self.total_batch_size:
            return super()._replaced(group, whole, part)
        num_rows = sum(num for _, num in spans)
        if part.shape != (num_rows, *whole.shape[1:]):
            raise ValueError(
                f"{num_rows} of these {whole.shape[0]} rows are this invoke's, so the value must be of shape "
                f"{(num_rows, *whole.shape[1:])}, got {tuple(part.shape)}"
            )
        replaced = whole.clone()
        for rows, span in zip(fitted(part, whole).chunk(len(spans)), spans, strict=True):
            replaced.narrow(0, *span).copy_(rows)
        return replaced

    def _narrow_lists(self, value: Any, group: BatchGroup | None) -> Any:
        """Narrow the lists and arrays of a dataclass, such as a pipeline's output, to an invoke's rows."""
        if group is None or self.covers_batch(group):
            return value
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        narrowed: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            items = getattr(value, field.name)
            spans = self._spans(len(items), group) if isinstance(items, list | np.ndarray) else []
            if len(spans) == 1:
                first_item, num_items = spans[0]
                narrowed[field.name] = items[first_item : first_item + num_items]
        return dataclasses.replace(value, **narrowed) if narrowed else value


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it
