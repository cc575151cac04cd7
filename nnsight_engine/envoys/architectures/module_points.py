"""Standard points of modules: read as a view of a module's value, written by replacing that value."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from nnsight_engine.core.tensors import fitted
from nnsight_engine.envoys.architectures.named_points import PointValueError

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.views import View
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.families.layout import Side
    from nnsight_engine.interleaving.mediator import Mediator


class PointAccess(Protocol):
    """A point that blocks read and write by its name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one position's value; -1 for a size that grows."""

    def read(self) -> torch.Tensor: ...

    def write(self, value: torch.Tensor) -> None: ...


def check_fits(name: str, value: object, current: torch.Tensor) -> torch.Tensor:
    """Return a value for writing, with the dtype and on the device of the current value.

    PointValueError: it is no tensor, has another shape, or fractions for integers. ValueError: it would
    overflow.
    """
    if not isinstance(value, torch.Tensor):
        raise PointValueError(
            f"{name} takes a tensor of shape {tuple(current.shape)}, got {type(value).__name__}; "
            f"to change some of it, edit in place: points[{name!r}][:] = ..."
        )
    if value.shape != current.shape:
        raise PointValueError(
            f"{name} takes a tensor of shape {tuple(current.shape)}, got one of {tuple(value.shape)}"
        )
    if value.is_floating_point() and not current.is_floating_point():
        raise PointValueError(f"{name} takes integers, got a tensor of {value.dtype}")
    return fitted(value, current)


@dataclasses.dataclass(frozen=True, slots=True)
class ModulePoint:
    name: str
    envoy: Envoy
    side: Side
    view: View
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Wait for the module's value and return this point's part, which a block may edit in place."""
        value = self._value()
        whole = first_tensor(value, self.side)
        part = self.view.part(whole)
        mediator = self.envoy.interleaver.current
        if mediator is not None and part is not whole and (part.requires_grad or self.view.is_copy):
            # A view is a side branch of the autograd graph and gets no gradient. Once the block continues,
            # the value is rebuilt from it, so that the model's path leads through the view. Edits of a copy
            # reach the model in the same way.
            mediator.transform = lambda: self._value_with(value, self.view.joined(whole, part))
        return part

    def write(self, value: torch.Tensor) -> None:
        """Replace the module's value by one with another part at this point."""
        current = self._value()
        whole = first_tensor(current, self.side)
        part = check_fits(self.name, value, self.view.part(whole))
        self._replace(self._value_with(current, self.view.joined(whole, part)))

    def _value(self) -> Any:
        return self.envoy.inputs if self.side == "input" else self.envoy.output

    def _replace(self, value: Any) -> None:
        if self.side == "input":
            self.envoy.inputs = value
        else:
            self.envoy.output = value

    def _value_with(self, value: Any, whole: torch.Tensor) -> Any:
        return with_first_tensor(value, self.side, whole)


class CopiedInputPoint(ModulePoint):
    """A module's input in memory that the layer still needs; the module gets a copy, which may be edited."""

    def read(self) -> torch.Tensor:
        value = self._value()
        self._replace(self._value_with(value, first_tensor(value, self.side).clone()))
        return super().read()


class EncoderPoint(ModulePoint):
    """The output of a block of the vision encoder, ``[…, patches, width]`` over the images of all invokes.

    Its first axis has no row of the batch, so it is offered only where there is nothing to divide.
    """

    def read(self) -> torch.Tensor:
        self._check_alone()
        return super().read()

    def write(self, value: torch.Tensor) -> None:
        self._check_alone()
        super().write(value)

    def _check_alone(self) -> None:
        """Raise PointValueError in an invoke that is not the only one of its batch."""
        mediator = self.envoy.interleaver.current
        group = None if mediator is None else mediator.batch_group
        if group is not None and not self.envoy.interleaver.batcher.covers_batch(group):
            raise PointValueError(
                f"{self.name} has the patches of the images of all invokes, which the encoder takes as one "
                "batch; trace each prompt apart"
            )


class TokenShape:
    """Records ``(rows, tokens)`` of the running step; None before the first layer of a run."""

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None

    def add(self, provider: str, iteration: int | None, value: Any) -> None:
        """Record the shape of a layer's input; the interleaver calls this with each value that it watches."""
        del provider, iteration
        num_rows, num_tokens, *_ = first_tensor(value, "input").shape
        self.shape = (num_rows, num_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class FlattenedPoint:
    """A module's input or output with rows and tokens in one axis, ``[batch * tokens, width]``.

    The batcher cannot assign such rows to invokes, so this works on the batcher's current value directly.
    """

    name: str
    envoy: Envoy
    side: Side
    tokens: TokenShape
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Wait for the value and return this block's rows, ``[batch, tokens, width]``, as a view."""
        value = self.envoy.inputs if self.side == "input" else self.envoy.output
        mediator = self.envoy.interleaver.current
        if mediator is None:
            return self._rows(self._whole(value), None)
        batcher = self.envoy.interleaver.batcher
        whole = self._whole(batcher.current_value)
        batcher.trust(whole)
        if self.side == "input":
            # The layer may still need the tensor: it is the residual stream if norms come last.
            whole = self._write_whole(whole.clone())
        rows = self._rows(whole, mediator)
        if rows.requires_grad or self._is_computed:
            mediator.transform = lambda: self._given_back(whole, rows, mediator)
        return rows

    def write(self, value: torch.Tensor) -> None:
        """Replace this block's rows in a new tensor, which takes the place of the module's."""
        rows = self.read()
        mediator = self.envoy.interleaver.current
        fitting = check_fits(self.name, value, rows)
        if mediator is None:
            raise PointValueError(f"{self.name} is assigned inside `with model.trace(...):`")
        mediator.transform = None
        whole = self._whole(self.envoy.interleaver.batcher.current_value)
        self._write_whole(self._with_rows(whole, fitting, mediator))

    def _rows(self, whole: torch.Tensor, mediator: Mediator | None) -> torch.Tensor:
        """Return a view of the block's rows, ``[rows, tokens, width]``; of all rows outside a block."""
        shape = self.tokens.shape
        if shape is not None and whole.shape[:-1] == shape:
            whole = whole.flatten(0, 1)  # some layers keep rows and tokens apart
        if shape is None or whole.shape[0] != shape[0] * shape[1]:
            raise PointValueError(
                f"{self.name} is available in traces of the whole model only: {self.envoy.path} has the "
                f"tokens of all rows in one axis, here {whole.shape[0]}, and only the layer around it "
                "determines their rows"
            )
        rows: torch.Tensor = whole.unflatten(0, shape)
        batcher = self.envoy.interleaver.batcher
        group = None if mediator is None else mediator.batch_group
        if group is None or batcher.covers_batch(group) or shape[0] != batcher.total_batch_size:
            return rows
        first_row, num_rows = group
        return rows.narrow(0, first_row, num_rows)

    def _with_rows(self, whole: torch.Tensor, rows: torch.Tensor, mediator: Mediator) -> torch.Tensor:
        new = whole.clone()
        self._rows(new, mediator).copy_(rows)
        return new

    def _given_back(self, whole: torch.Tensor, rows: torch.Tensor, mediator: Mediator) -> Any:
        """Route the model's path through the rows, so that they get a gradient; return the current value."""
        self._write_whole(self._with_rows(whole, rows, mediator))
        return self.envoy.interleaver.batcher.narrow(mediator.batch_group)

    def _write_whole(self, whole: torch.Tensor) -> torch.Tensor:
        batcher = self.envoy.interleaver.batcher
        batcher.current_value = self._with_whole(batcher.current_value, whole)
        return whole

    # The tensor of the module's value.

    _is_computed: ClassVar[bool] = False
    """Whether ``_whole`` returns a new tensor, whose edits reach the model with ``_with_whole`` only."""

    def _whole(self, value: Any) -> torch.Tensor:
        return first_tensor(value, self.side)

    def _with_whole(self, value: Any, whole: torch.Tensor) -> Any:
        return with_first_tensor(value, self.side, whole)


@dataclasses.dataclass(frozen=True, slots=True)
class LogitsPoint:
    """The logits in the model's own output, after scales and soft caps."""

    envoy: Envoy
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        return _logits(self.envoy.output)

    def write(self, value: torch.Tensor) -> None:
        output = self.envoy.output
        replaced = copy.copy(output)
        replaced.logits = check_fits("logits", value, _logits(output))
        self.envoy.output = replaced


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise PointValueError(
            f"the model must return an output with logits, got {type(output).__name__}; "
            "drop return_dict=False"
        )
    return logits


def first_tensor(value: Any, side: Side) -> torch.Tensor:
    """Return the first argument of ``(args, kwargs)``, or the output (of a tuple, its first item)."""
    if side == "input":
        args, kwargs = value
        first = args[0] if args else next(iter(kwargs.values()))
    else:
        first = value[0] if isinstance(value, tuple) else value
    tensor: torch.Tensor = first
    return tensor


def with_first_tensor(value: Any, side: Side, tensor: torch.Tensor) -> Any:
    """Return a module's value with another first tensor, see ``first_tensor``."""
    if side == "output":
        return (tensor, *value[1:]) if isinstance(value, tuple) else tensor
    args, kwargs = value
    if args:
        return (tensor, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): tensor}
