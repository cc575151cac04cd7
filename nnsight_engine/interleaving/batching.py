"""Rows of a batch: several invokes share one forward pass, and each sees only its own rows.

Rows never overlap, and are in the order in which the invokes were defined. An empty invoke sees all of them.
A tensor belongs to the batch if the length of its first dimension is the batch size; any other tensor (a
rotary table, a scalar) is shared and seen whole.

State that a model keeps from step to step, such as KV caches, is in objects that hold rows of the whole
batch. ``core.trees`` does not treat them as containers, since the model continues with the same object. An
invoke gets a copy of the object, and of the layers in it, whose tensors are views of its own rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nnsight_engine.core.tensors import fitted
from nnsight_engine.core.trees import map_pairs, map_tensors, tensors


def holds_state(value: object) -> bool:
    """Return whether an object is a cache, such as ``DynamicCache``, ``StaticCache`` or ``MambaCache``."""
    return hasattr(value, "__dict__") and _has_base_called(type(value), "Cache")


def without_state(leaf: Any) -> Any:
    return None if holds_state(leaf) else leaf


def map_state(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a cache with ``fn`` applied to its tensors; other objects in it are shared."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: map_state(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([map_state(item, fn) for item in value])  # a cache has no namedtuples
    if not _is_part(value):
        return value
    copied = copy.copy(value)
    copied.__dict__.update({name: map_state(item, fn) for name, item in vars(value).items()})
    return copied


def state_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a cache and in its layers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from state_tensors(item)
    elif isinstance(value, dict):
        yield from state_tensors(list(value.values()))
    elif _is_part(value):
        yield from state_tensors(list(vars(value).values()))


def _is_part(value: object) -> bool:
    return hasattr(value, "__dict__") and (
        _has_base_called(type(value), "Cache") or _has_base_called(type(value), "Layer")
    )


def _has_base_called(kind: type, name: str) -> bool:
    """Match a class, or a base, by the end of its name, as many models have own caches; never a module."""
    return not issubclass(kind, torch.nn.Module | type) and any(
        base.__name__.endswith(name) for base in kind.__mro__
    )


BatchGroup = tuple[int, int]
"""First row and number of rows."""


def check_written(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return ``part``; ValueError if it is sparse, quantized or meta, or is complex and ``whole`` is not."""
    reason = ""
    if part.layout is not torch.strided:
        reason = "it is sparse; give tensor.to_dense()"
    elif part.is_quantized:
        reason = "it is quantized; give tensor.dequantize()"
    elif part.is_meta and not whole.is_meta:
        reason = "it is on the meta device, where tensors have no numbers"
    elif part.is_complex() and not whole.is_complex():
        reason = "it is complex; give tensor.real"
    if reason:
        raise ValueError(f"a tensor of {part.dtype} cannot take the place of one of {whole.dtype}: {reason}")
    return part


def refuse_unpacked(whole: Any, part: Any) -> None:
    """Raise ValueError for a tensor that could be unpacked as the sequence that it replaces."""
    is_sequence = isinstance(whole, tuple | list) and isinstance(part, torch.Tensor) and bool(part.ndim)
    if is_sequence and len(whole) == len(part) > 1:
        kind = type(whole).__name__
        raise ValueError(
            f"the value is a {kind} of {len(whole)}, and a tensor of {len(part)} rows would be unpacked in "
            "its place, row by row. Edit the item, `output[0][:] = ...`, or assign all items, `output = "
            "(tensor, *output[1:])`."
        )


def difference(before: Any, after: Any) -> str:
    """Return how the containers, and shapes, dtypes and devices of tensors differ; empty if they do not."""
    try:
        map_pairs(before, after, _same_form)
    except ValueError as error:
        return str(error)
    return ""


def _same_form(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return ``whole``; ValueError if ``part`` has another shape, dtype or device."""
    forms = [(tuple(tensor.shape), tensor.dtype, str(tensor.device)) for tensor in (whole, part)]
    if forms[0] != forms[1]:
        expected, got = (f"a tensor {list(shape)} of {dtype} on {device}" for shape, dtype, device in forms)
        raise ValueError(f"expected {expected}, got {got}")
    return whole


class Batchable:
    """The part of a model that turns the arguments of ``trace`` and ``invoke`` into one batch."""

    def _new_batcher(self) -> Batcher:
        return Batcher()

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return the arguments and the number of their rows; zero rows mean an empty invoke."""
        return inputs, kwargs, 1 if inputs or kwargs else 0

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the batch with the prepared arguments of one more invoke added."""
        raise NotImplementedError(
            f"Batching is not implemented for {type(self).__name__}: it can take one invoke with an input, "
            "and any number of empty ones. For several inputs, implement _prepare_input() and _batch() on "
            "the model's class, as LanguageModel does."
        )


class Batcher:
    """The batch of one trace: its inputs, the rows of each invoke, and the model's current value.

    ``loans`` has the parts of that value that invokes were given; None if they got none, or all of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create an empty batch; the arguments are those of the traced function for all invokes together."""
        self.shared_args = args
        self.shared_kwargs = kwargs
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.groups: list[BatchGroup] = []
        self.total_batch_size = 0
        self.current_value: Any = None
        self.loans: Loans | None = None

    def add(self, model: Batchable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchGroup | None:
        """Add an invoke's input and return its rows, or None for an empty invoke."""
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

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """The batch's attention mask (tokens 1, padding 0), ``[rows, positions]``; None where unknown."""
        mask = self.inputs[1].get("attention_mask") if self.inputs is not None else None
        return mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None

    def _padding_hint(self, expected: torch.Size, actual: torch.Size) -> str:
        """Return a hint for the error about a shape that a text without padding has; otherwise empty."""
        mask = self.attention_mask
        if mask is None or len(actual) < 2 or expected[1] != mask.shape[1] or bool(mask.all()):
            return ""
        if actual[1] not in mask.sum(-1).tolist():
            return ""
        return (
            f"; shorter texts are padded to the {mask.shape[1]} positions of the longest one, and "
            "tracer.attention_mask, tracer.lengths and tracer.first_positions locate their tokens"
        )

    def forget(self) -> None:
        self.shared_args, self.shared_kwargs, self.inputs = (), {}, None
        self.current_value = self.loans = None

    def covers_batch(self, group: BatchGroup | None) -> bool:
        return group is None or group[1] == self.total_batch_size

    def _lending(self) -> Loans:
        if self.loans is None:
            self.loans = Loans()
        return self.loans

    def narrow(self, group: BatchGroup | None) -> Any:
        """Return these rows of the current value, as views, so that in-place edits reach the model."""
        if group is None or self.covers_batch(group):
            return self.current_value
        narrowed = self._narrowed(group, lambda state: self._narrow_state(state, group))
        if not isinstance(narrowed, torch.Tensor) and narrowed is not self.current_value:
            self._lending().trees.append((narrowed, list(tensors(narrowed)), group))
        return narrowed

    def narrow_without_state(self, group: BatchGroup | None) -> Any:
        """Return these rows with None in place of KV caches, which are costly to narrow in each module."""
        if group is None or self.covers_batch(group):
            return map_tensors(self.current_value, lambda tensor: tensor, without_state)
        return self._narrowed(group, without_state)

    def _narrowed(self, group: BatchGroup, narrow_state: Callable[[Any], Any]) -> Any:
        """Return these rows of the current value, with ``narrow_state`` applied to the caches in it."""
        return map_tensors(
            self.current_value,
            lambda tensor: self._rows(tensor, group),
            lambda leaf: narrow_state(leaf) if holds_state(leaf) else leaf,
        )

    def _narrow_state(self, whole: Any, group: BatchGroup) -> Any:
        """Return an invoke's rows of a KV cache, and note the loan, which ``reclaim`` checks."""
        part = map_state(whole, lambda tensor: self._rows(tensor, group))
        self._lending().states.append((part, whole, list(state_tensors(part))))
        return part

    def _rows(self, tensor: torch.Tensor, group: BatchGroup | None) -> torch.Tensor:
        """Return a view of an invoke's rows of a tensor, or the whole if it has no rows; note the loan."""
        if group is None or not tensor.ndim or tensor.shape[0] != self.total_batch_size:
            return self._lend_whole(tensor)
        views = self._lending().views
        for view in views:  # reuse the view, so that there is one tensor that gets the gradient
            if view.whole is tensor and view.group == group:
                return view.rows
        rows = tensor.narrow(0, *group)
        views.append(_View(tensor, group, rows))
        return rows

    def _lend_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note the version of a tensor that all invokes share, so that ``reclaim`` finds edits in place."""
        if not tensor.is_inference():  # inference tensors have no version counter
            self._lending().shared.append((tensor, tensor._version))  # noqa: SLF001 - has no public name
        return tensor

    def trust(self, tensor: torch.Tensor) -> None:
        """Permit in-place edits of a shared tensor, by code that knows the rows of each invoke in it."""
        if self.loans is not None:
            self.loans.shared = [(lent, version) for lent, version in self.loans.shared if lent is not tensor]

    def reclaim(self) -> None:
        """Check what an invoke did with its values; call it once the invoke has handed over.

        A tensor that it put into a dict, a list or a model's output replaces the tensor there. ValueError: it
        edited a tensor in place that all invokes share, or put a tensor into its part of a KV cache.
        """
        loans = self.loans
        if loans is None:
            return
        for tensor, version in loans.shared:
            if tensor._version != version:  # noqa: SLF001
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} is shared by all invokes and has no rows of "
                    "single ones, and an invoke edited it in place; only an empty invoke, "
                    "tracer.invoke(), can edit it"
                )
        for part, _, lent_tensors in loans.states:
            if list(map(id, state_tensors(part))) != list(map(id, lent_tensors)):
                raise ValueError(
                    f"an invoke has its own rows of the {type(part).__name__}, and put tensors into it or "
                    "updated it, which the model would not see: edit its tensors in place, or work on "
                    "copy.deepcopy of it"
                )
        for index, (tree, leaves, group) in enumerate(loans.trees):
            leaves_now = list(tensors(tree))
            if len(leaves_now) != len(leaves) or any(
                leaf is not lent_leaf for leaf, lent_leaf in zip(leaves_now, leaves, strict=True)
            ):
                loans.trees[index] = (tree, leaves_now, group)
                self.swap(group, tree)

    def swap(self, group: BatchGroup | None, value: Any) -> None:
        """Replace these rows in a new tensor: saved values are unchanged. ValueError if they do not fit."""
        if self.covers_batch(group):
            self.current_value = value
            return
        assert group is not None  # noqa: S101 - an empty invoke sees all
        states = {id(part): whole for part, whole, _ in self.loans.states} if self.loans is not None else {}
        if states:  # the model keeps its own cache object, whose tensors have the in-place edits already
            value = map_tensors(value, lambda tensor: tensor, lambda leaf: states.get(id(leaf), leaf))
        self.current_value = map_pairs(
            self.current_value, value, lambda whole, part: self._replaced(group, whole, part)
        )

    def _replaced(self, group: BatchGroup, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor with an invoke's rows replaced; ValueError if the new ones do not fit."""
        first_row, num_rows = group
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
                f"{self._padding_hint(whole.shape, part.shape)}"
            )
        check_written(part, whole)
        rows_after = whole.narrow(0, first_row + num_rows, self.total_batch_size - first_row - num_rows)
        part = fitted(part, whole)
        replaced = torch.cat([whole.narrow(0, 0, first_row), part, rows_after])
        if self.loans is not None:
            views = [view for view in self.loans.views if view.whole is not whole or view.group != group]
            for view in views:
                if view.whole is whole:  # views of other invokes stay valid, but have to be merged in again
                    view.whole, view.apart = replaced, True
            self.loans.views = views
        return replaced

    def join(self, parts: list[Any]) -> Any:
        """Join the invokes' values, in order; ValueError if one has not as many rows as its invoke."""
        for part, (_, num_rows) in zip(parts, self.groups, strict=True):
            tensor = next(tensors(part), None)
            if tensor is not None and tensor.ndim and not self._fits(tensor.shape[0], num_rows):
                raise ValueError(
                    f"this invoke owns {num_rows} of {self.total_batch_size} rows, so the value must be of "
                    f"shape {(num_rows, *tensor.shape[1:])}, got {tuple(tensor.shape)}"
                )
        return self._joined(parts)

    def _fits(self, length: int, num_rows: int) -> bool:
        return length == num_rows

    def _joined(self, parts: list[Any]) -> Any:
        """Concatenate the tensors of the invokes' values, rows after rows."""
        whole = parts[0]
        for part in parts[1:]:
            whole = map_pairs(whole, part, lambda first, second: torch.cat([first, second.to(first)]))
        return whole

    def settle(self) -> None:
        """Merge views into the model's value where needed; call it after all invokes were served.

        A view is beside the model's path through autograd, and detached once another invoke has replaced its
        rows: the tensor is concatenated from the views, and the path leads through them.
        """
        if self.loans is None:
            return
        views, self.loans.views = self.loans.views, []
        grad = torch.is_grad_enabled()
        apart = {id(view.whole) for view in views if view.apart or (grad and view.rows.requires_grad)}
        if not apart:
            return

        def rejoined(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in apart:
                return tensor
            rows = {view.group: view.rows for view in views if view.whole is tensor}
            return torch.cat([rows.get(group, tensor.narrow(0, *group)) for group in self.groups])

        self.current_value = map_tensors(self.current_value, rejoined)


class _View:
    """An invoke's rows of ``whole``; once ``apart``, they are no view of it and have to be merged in."""

    __slots__ = ("apart", "group", "rows", "whole")

    def __init__(self, whole: torch.Tensor, group: BatchGroup, rows: torch.Tensor) -> None:
        """Note the rows of ``whole`` that the invoke with these rows, ``group``, was given."""
        self.whole = whole
        self.group = group
        self.rows = rows
        self.apart = False


class Loans:
    """The parts of one value that were handed to invokes."""

    __slots__ = ("shared", "states", "trees", "views")

    def __init__(self) -> None:
        self.views: list[_View] = []
        self.shared: list[tuple[torch.Tensor, int]] = []
        """Tensors that all invokes share, with their versions when they were handed out."""
        self.trees: list[tuple[Any, list[torch.Tensor], BatchGroup]] = []
        """Narrowed containers, the tensors that were in them, and the rows."""
        self.states: list[tuple[Any, Any, list[torch.Tensor]]] = []
        """Narrowed KV caches, the model's own, and the tensors that were in the narrowed ones."""
