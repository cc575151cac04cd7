"""Rows of a batch: several invokes share one forward pass, and each sees only its own rows.

Rows never overlap, and are in the order in which the invokes were defined. An empty invoke owns no rows and
sees them all. A tensor belongs to the batch if its first dimension is as long as the batch is; anything else
(a rotary table, a scalar) is shared and seen whole.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_engine.core.trees import map_pairs, map_tensors

BatchGroup = tuple[int, int]
"""First row and number of rows."""


class Batchable:
    """How a model turns what a user passes to ``trace`` and ``invoke`` into one batch."""

    def _new_batcher(self) -> Batcher:
        """Return what keeps the rows of one trace."""
        return Batcher()

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return positional arguments, keyword arguments, and the number of rows they make.

        Zero rows mean an empty invoke.
        """
        return inputs, kwargs, 1 if inputs or kwargs else 0

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the invokes so far with one more invoke's, prepared, added."""
        raise NotImplementedError(
            f"Batching is not implemented for {type(self).__name__}: it can take one invoke with an "
            "input, and any "
            "number of empty ones. For several inputs, implement _prepare_input() and _batch() on "
            "the model's "
            "class, as LanguageModel does."
        )


class Batcher:
    """The batch of one trace: what went in, whose rows are whose, and the value being handled now.

    Attributes:
        current_value: The value at the point that the model is at.
        total_batch_size: Number of rows of all invokes together.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start empty, with the arguments that every invoke shares."""
        self.shared_args = args
        self.shared_kwargs = kwargs
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.groups: list[BatchGroup] = []
        self.total_batch_size = 0
        self.current_value: Any = None
        self._lent: list[tuple[torch.Tensor, BatchGroup, torch.Tensor]] = []

    def add(self, model: Batchable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchGroup | None:
        """Add an invoke's input; returns its rows, or None for an empty invoke."""
        prepared, prepared_kwargs, num_rows = model._prepare_input(*args, **kwargs)  # noqa: SLF001 - a hook for subclasses
        if not num_rows:
            return None
        if self.inputs is None:
            self.inputs = (prepared, prepared_kwargs)
        else:
            self.inputs = model._batch(self.inputs, *prepared, **prepared_kwargs)  # noqa: SLF001 - a hook for subclasses
        group = (self.total_batch_size, num_rows)
        self.groups.append(group)
        self.total_batch_size += num_rows
        return group

    def sees_all(self, group: BatchGroup | None) -> bool:
        """Tell whether these rows are the whole batch."""
        return group is None or group[1] == self.total_batch_size

    @property
    def lends(self) -> bool:
        """Whether some invoke was given a view of the current value."""
        return bool(self._lent)

    def narrow(self, group: BatchGroup | None) -> Any:
        """Return the current value with only these rows; views, so that edits in place reach the model."""
        if self.sees_all(group):
            return self.current_value
        return map_tensors(self.current_value, lambda tensor: self._rows(tensor, group))

    def _rows(self, tensor: torch.Tensor, group: BatchGroup | None) -> torch.Tensor:
        if group is None or not tensor.ndim or tensor.shape[0] != self.total_batch_size:
            return tensor
        for whole, lent_to, rows in self._lent:  # the same view again, so that its gradient is one tensor's
            if whole is tensor and lent_to == group:
                return rows
        rows = tensor.narrow(0, *group)
        self._lent.append((tensor, group, rows))
        return rows

    def swap(self, group: BatchGroup | None, value: Any) -> None:
        """Replace these rows of the current value.

        A new tensor is made: what was read from the old one before, and saved, keeps its numbers.

        Raises:
            ValueError: The rows do not fit, or the value is not shaped like the one it replaces.
        """
        if self.sees_all(group):
            self.current_value = value
            return
        assert group is not None  # noqa: S101 - an empty invoke sees all
        own = group
        self.current_value = map_pairs(
            self.current_value, value, lambda whole, part: self._replaced(own, whole, part)
        )

    def _replaced(self, group: BatchGroup, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with these rows replaced."""
        first, num_rows = group
        if not whole.ndim or whole.shape[0] != self.total_batch_size:
            if part is whole:
                return whole
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} belongs to all invokes together, "
                "so only an empty one, tracer.invoke(), can replace it"
            )
        if part.shape != (num_rows, *whole.shape[1:]):
            raise ValueError(
                f"this invoke owns {num_rows} of {self.total_batch_size} rows, so the value must be of "
                f"shape {(num_rows, *whole.shape[1:])}, got {tuple(part.shape)}"
            )
        after = whole.narrow(0, first + num_rows, self.total_batch_size - first - num_rows)
        return torch.cat([whole.narrow(0, 0, first), part.to(whole), after])

    def join(self, parts: list[Any]) -> Any:
        """Return the invokes' values, in order, as one value of the whole batch."""
        whole = parts[0]
        for part in parts[1:]:
            whole = map_pairs(whole, part, lambda first, second: torch.cat([first, second.to(first)]))
        return whole

    def settle(self) -> None:
        """Put rows that take part in autograd back into the model's graph, once all have been handled.

        A view is a branch beside the model's path, so no gradient would reach it. The tensor is put together
        from the views, and the path leads through them.
        """
        lent, self._lent = self._lent, []
        if not torch.is_grad_enabled() or not any(rows.requires_grad for _, _, rows in lent):
            return
        by_tensor: dict[int, dict[int, torch.Tensor]] = {}
        for whole, (first, _), rows in lent:
            by_tensor.setdefault(id(whole), {})[first] = rows

        def rejoined(tensor: torch.Tensor) -> torch.Tensor:
            views = by_tensor.get(id(tensor))
            if views is None or not any(rows.requires_grad for rows in views.values()):
                return tensor
            return torch.cat([views.get(group[0], tensor.narrow(0, *group)) for group in self.groups])

        self.current_value = map_tensors(self.current_value, rejoined)
