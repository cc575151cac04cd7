"""A module call for an untrusted block, computed in parts between which the engine can do other work.

Modules that only compute on rows return the same for each row whatever the others are, so only a few are
computed at once. Their number depends on the module alone, so that the same call returns bitwise the same
result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from nnsight_engine.core.trees import map_tensors, tensors

_PART_WORK: Final = 2**30
"""Multiplications of one part: a few milliseconds."""
_MIN_ROWS: Final = 16


def rows_at_once(row_work: int) -> int:
    """Return the number of rows of a part, given the multiplications per row."""
    return max(_MIN_ROWS, _PART_WORK // max(row_work, 1))


class ModuleCall:
    """A call in progress; ``args`` are rows ``[..., width]`` or tokens, all with the same axes of rows."""

    def __init__(
        self,
        path: str,
        apply: Callable[..., Any],
        args: Sequence[torch.Tensor],
        num_axes: int,
        part_rows: int,
    ) -> None:
        self.path = path
        self._apply = apply
        self._lead = args[0].shape[:num_axes]
        self.num_rows = self._lead.numel()
        self.num_done = 0
        self.part_rows = part_rows
        self._is_whole = self.num_rows <= part_rows
        self._args = list(args)
        if not self._is_whole:
            self._args = [one.reshape(self.num_rows, *one.shape[num_axes:]) for one in args]
        self._parts: list[Any] = []

    @property
    def is_done(self) -> bool:
        return bool(self._parts) and self.num_done >= self.num_rows

    def go_on(self) -> None:
        first = self.num_done
        args = self._args if self._is_whole else [one[first : first + self.part_rows] for one in self._args]
        with torch.inference_mode():
            # As for a block in the worker: without the hooks that count the model's own calls.
            self._parts.append(self._apply(*args))
        self.num_done = min(first + self.part_rows, self.num_rows)

    def result(self) -> Any:
        if self._is_whole:
            return self._parts[0]
        columns = [list(tensors(part)) for part in self._parts]
        merged = iter([torch.cat(column) for column in zip(*columns, strict=True)])
        return map_tensors(self._parts[0], lambda _: self._shaped(next(merged)))

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*self._lead, *rows.shape[1:])


__all__ = ["ModuleCall", "rows_at_once"]
