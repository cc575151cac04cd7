"""A call of a module for a stranger's block, made of parts between which the engine may do something else.

One call may have as many rows as a step of the engine has, and an unembedding multiplies each with a
hundred million numbers. Modules that only compute on rows give the same for each row whatever is beside it,
so few rows are computed at once; how many depends on the module alone, so that the same call gives the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from nnsight_engine.core.trees import map_tensors, tensors

_PART_WORK: Final = 2**30
"""Multiplications of one part: some milliseconds."""
_LEAST_ROWS: Final = 16


def rows_at_once(row_work: int) -> int:
    """Return how many rows a part has, each of which takes so many multiplications."""
    return max(_LEAST_ROWS, _PART_WORK // max(row_work, 1))


class ModuleCall:
    """One call that has begun.

    Args:
        path: Of the module.
        apply: Calls it.
        args: Tensors of rows ``[..., width]``, or of tokens, all with the same rows.
        num_axes: How many axes of these are of rows.
        part_rows: Rows that are computed at once.

    Attributes:
        num_rows: Of the whole call.
        part_rows: As above.
        num_done: Of these, how many have been computed.
    """

    def __init__(
        self,
        path: str,
        apply: Callable[..., Any],
        args: Sequence[torch.Tensor],
        num_axes: int,
        part_rows: int,
    ) -> None:
        """Compute nothing yet."""
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
        """Whether all of it has been computed."""
        return bool(self._parts) and self.num_done >= self.num_rows

    def go_on(self) -> None:
        """Compute the next part."""
        first = self.num_done
        args = self._args if self._is_whole else [one[first : first + self.part_rows] for one in self._args]
        with torch.inference_mode():
            # As in a block of the worker's: without the hooks that count the model's own calls.
            self._parts.append(self._apply(*args))
        self.num_done = min(first + self.part_rows, self.num_rows)

    def result(self) -> Any:
        """Return what the module gives."""
        if self._is_whole:
            return self._parts[0]
        columns = [list(tensors(part)) for part in self._parts]
        merged = iter([torch.cat(column) for column in zip(*columns, strict=True)])
        return map_tensors(self._parts[0], lambda _: self._shaped(next(merged)))

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*self._lead, *rows.shape[1:])


__all__ = ["ModuleCall", "rows_at_once"]
