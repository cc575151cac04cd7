"""How large a result will be, found out before it is made, and how large one is.

Most calls are small by a rough bound: the product of all sizes and numbers given. The others are tried on
torch's meta device, which computes shapes and no numbers: microseconds, beside an operation on millions of
numbers. What cannot be told in either way is refused when the bound is above what is left.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.sandbox.restricted.arguments import (
    AS_IT_IS,
    BY_PLACE,
    as_sizes,
    check_numpy,
    check_torch,
    dense,
    of_numbers,
    plain,
)
from nnsight_engine.sandbox.restricted.budget import FuelMeter, refusal
from nnsight_engine.sandbox.restricted.names import names_in
from nnsight_engine.sandbox.restricted.whole_numbers import check_ints

_WIDEST: Final = 16
"""Bytes of the widest number."""
_ITEM: Final = 8
"""Bytes that a container needs for an item."""
_OBJECT: Final = 256
"""Bytes that a tensor or an array needs beside its numbers."""
_MOST_SIZES: Final = 12
_MOST_TENSORS: Final = 4096
_MAX_FREE_BOUND: Final = 2**22
"""Numbers in a result that need no second look."""

_OF_ARRAYS: Final = (np.ndarray, np.generic)
_SEQUENCES: Final = (list, tuple, str, bytes)
_NUMBERS_IN_TEXT: Final = re.compile(r"\d+")
_MOST_DIGITS: Final = 4
_EXACT: Final = frozenset({Fraction, Decimal})
"""Numbers that ``statistics`` may give to code, and that grow without end."""
_NUMBER_KINDS: Final = frozenset({int, float, bool})
_SQUARING: Final = names_in(
    """
    block_diag cartesian_prod combinations corrcoef cov diag diag_embed diagflat eye fold identity
    interpolate matrix_exp pad pdist tri tril_indices triu_indices unfold upsample vander repeat
    rearrange reduce conv1d conv2d conv3d conv_transpose1d meshgrid conv_transpose2d conv_transpose3d
    constant_pad_nd linspace logspace arange range full zeros ones empty rand randn randint randperm
    new_zeros new_ones new_full new_empty tile broadcast_to stft istft hamming_window hann_window
    kaiser_window bartlett_window blackman_window fft ifft rfft irfft fftn ifftn fft2 ifft2 histc
    histogram normal ones_like zeros_like resize indices geomspace einsum take_along_dim index_select
    embedding
    """
)
"""Calls whose result may exceed the product of what they are given, or whose numbers are sizes: tried out."""
_SQUARES: Final = frozenset({"eye", "identity", "diag", "cov", "corrcoef"})
"""Those of numpy that make a matrix as wide as it is high."""
_BY_CONTENT: Final = names_in(
    """
    argwhere bincount eig eigvals histc histogram is_nonzero item masked_select multinomial nonzero
    one_hot repeat_interleave tolist unique unique_consecutive
    """
)
"""Calls whose result depends on the numbers in tensors: bounded by what they are given, or looked at."""
_AS_GIVEN: Final = names_in(
    """
    array as_tensor asarray cat column_stack concat concatenate dstack hstack new_tensor stack tensor
    vstack
    """
)
"""Calls whose result is what they are given, put together."""
_GROWING: Final = names_in(
    """
    bincount histc histogram multinomial one_hot repeat_interleave
    """
)
"""Those of them whose result may be larger than what they are given."""


def size_of(value: Any) -> int:
    """Return the bytes of a value's own memory: of tensors, arrays, strings and containers."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value)
    if kind is list or kind is tuple:
        return len(value) * _ITEM + sum(
            size_of(one) for one in value[:64] if isinstance(one, torch.Tensor | np.ndarray)
        )
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict | set | frozenset | tuple | list | str | bytes):
        return len(value) * _ITEM * 8 if isinstance(value, dict | set | frozenset) else len(value) * _ITEM
    return 0


def charge_result(meter: FuelMeter, value: Any) -> Any:
    """Count a result's bytes, and return it."""
    if isinstance(value, torch.Tensor):
        meter.charge(dense(value).numel() * value.element_size() + _OBJECT)
        return value
    if isinstance(value, np.ndarray):
        of_numbers(value)
    elif type(value) is tuple:
        for one in value:
            if isinstance(one, torch.Tensor):
                dense(one)
    num_bytes = size_of(value)
    if num_bytes > _OBJECT:
        meter.charge(num_bytes)
    return value


class Sizer:
    """Measures for one budget."""

    def __init__(self, meter: FuelMeter) -> None:
        """Count on this meter."""
        self._meter = meter

    def call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function of torch or numpy whose result is not too large.

        Raises:
            Stop: It is.
            SandboxError: The arguments are not for functions of C.
        """
        of_numpy = _is_of_numpy(function, args)
        if of_numpy:
            check_numpy(name, function, args, kwargs)
        elif kwargs or name in BY_PLACE:
            check_torch(name, args, kwargs)
        for one in args:
            if type(one) not in AS_IT_IS:
                args = tuple([plain(one, self._meter, of_numpy=of_numpy) for one in args])
                break
        if kwargs:
            kwargs = {key: plain(one, self._meter, of_numpy=of_numpy) for key, one in kwargs.items()}
        if name in _AS_GIVEN:
            self._meter.charge(sum(map(_put_together, (*args, *kwargs.values()))))
        else:
            self._check_size(name, function, args, kwargs, of_numpy=of_numpy)
        return charge_result(self._meter, function(*args, **kwargs))

    def _check_size(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        of_numpy: bool,
    ) -> None:
        """Stop if the result will be too large."""
        has_sizes = name in _SQUARING or name in _GROWING
        if has_sizes or of_numpy:
            first = () if name not in _BY_CONTENT else args[:1]
            args = (*first, *as_sizes(args[len(first) :]))
            kwargs = dict(zip(kwargs, as_sizes(kwargs.values()), strict=True))
        bound = _bound(args) * _bound(kwargs.values()) if kwargs else _bound(args)
        if bound > _MAX_FREE_BOUND or has_sizes:
            self._try_out(name, function, args, kwargs, bound, of_numpy=of_numpy)

    def method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of a tensor or an array whose result is not too large."""
        return self.call(name, _Method(name), (owner, *args), kwargs)

    def _try_out(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        bound: float,
        *,
        of_numpy: bool,
    ) -> None:
        left = self._meter.bytes_left
        if of_numpy and name == "repeat":
            name = "repeat_interleave"
        if name in _BY_CONTENT or (name == "where" and len(args) + len(kwargs) == 1):
            self._look_at_content(name, args, kwargs)
            return
        same = _same_shapes((*args, *kwargs.values()))
        if same and name not in _SQUARING and name not in _PRODUCTS and same * _WIDEST <= left:
            return
        if of_numpy or any(isinstance(one, _OF_ARRAYS) for one in args):
            self._meter.charge(_of_arrays(name, args, kwargs, bound, left))
            return
        try:
            num_bytes = _tried(function, args, kwargs)
        except (NotImplementedError, AttributeError, AssertionError) as error:
            if bound * _WIDEST > left:
                raise refusal(f"`{name}` on so much, whose result's size cannot be told before,") from error
            return
        except Exception:
            if bound * _WIDEST <= left or not _could_grow(args, kwargs):
                return
            raise
        if num_bytes > left:
            self._meter.charge(num_bytes)

    def _look_at_content(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Bound results that depend on numbers in tensors."""
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, list | tuple | int | float):
            first = np.asarray(first)
        if not isinstance(first, torch.Tensor | np.ndarray):
            return
        num = math.prod(first.shape)
        given = [one for one in (*args[1:], *kwargs.values()) if type(one) is int]
        if name == "repeat_interleave":
            num *= max([1, *given, *_largest(*args, *kwargs.values())])
        elif name in {"bincount", "one_hot"}:
            width = max([1, *given, *(one + 1 for one in _largest(first))])
            num = width if name == "bincount" else num * width
        elif name in _GROWING:
            num = max(num, math.prod(max(one, 1) for one in given)) * max([1, *first.shape[:1]])
        else:
            for other in args[1:]:
                num = max(num, _of_pair("+", first.shape, getattr(other, "shape", ())))
            num *= first.ndim + 1
        if num * _ITEM > self._meter.bytes_left:
            self._meter.charge(num * _ITEM)

    # Operators.

    def operands(self, operator: str, left: Any, right: Any) -> None:
        """Check that an operator's result is not too large."""
        if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            left, right = (plain(one, self._meter, of_numpy=True) for one in (left, right))
            self._meter.charge(_of_pair(operator, np.shape(left), np.shape(right)) * _WIDEST + _OBJECT)
        elif isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            self._of_tensors(operator, left, right)
        elif isinstance(left, str | bytes) and operator == "%":
            self._of_percent(left, right)
        elif isinstance(left, str | bytes | list | tuple) or isinstance(right, str | bytes | list | tuple):
            self._of_sequences(operator, left, right)
        elif isinstance(left, int) and isinstance(right, int):
            check_ints(operator, left, right)
        elif type(left) in _EXACT or type(right) in _EXACT:
            raise refusal("an operator on fractions", "make them floats first")

    def _of_tensors(self, operator: str, left: Any, right: Any) -> None:
        left_shape, right_shape = getattr(left, "shape", ()), getattr(right, "shape", ())
        if isinstance(left, _SEQUENCES) or isinstance(right, _SEQUENCES):
            raise refusal("an operator between a tensor and a list", "make the list a tensor first")
        num = (
            math.prod(left_shape)
            if left_shape == right_shape
            else _of_pair(operator, left_shape, right_shape)
        )
        width = max(one.element_size() for one in (left, right) if isinstance(one, torch.Tensor))
        self._meter.charge(num * width + _OBJECT)

    def _of_sequences(self, operator: str, left: Any, right: Any) -> None:
        if operator == "+":
            self._meter.charge(_len(left) + _len(right))
        elif operator == "*":
            sequence, times = (left, right) if not isinstance(left, int | np.integer) else (right, left)
            if isinstance(times, int | np.integer):
                self._meter.charge(_len(sequence) * max(int(times), 0))

    def _of_percent(self, text: str | bytes, values: Any) -> None:
        pattern = text.decode("latin-1") if isinstance(text, bytes) else text
        self._meter.charge(check_format(pattern))
        if "*" in pattern:
            raise refusal("`%` with a width that is a `*`", "write an f-string")
        every = (
            values
            if isinstance(values, tuple)
            else tuple(values.values())
            if isinstance(values, dict)
            else (values,)
        )
        self._meter.charge(len(pattern) + sum(_len(one) for one in every) * max(1, pattern.count("%")))


class _Method:
    """A method of whatever it is called with."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, self.name)(*args, **kwargs)


_PRODUCTS: Final = names_in(
    """
    bilinear bmm cdist cross inner kron linear matmul mm multi_dot outer ger tensordot baddbmm addmm
    addbmm addr dot convolve correlate gather
    """
)
"""Calls on tensors of one shape whose result may be larger than them together."""


def check_format(text: str) -> int:
    """Refuse widths that fill the memory, in a format of any kind; returns all of them together."""
    widths = _NUMBERS_IN_TEXT.findall(text)
    if any(len(one) > _MOST_DIGITS for one in widths):
        raise refusal("a format with a number of more than four digits")
    return sum(map(int, widths))


def _len(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return len(value) * _ITEM if isinstance(value, list | tuple | dict | set | frozenset) else 32


def _is_of_numpy(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Tell whether a function is numpy's, or a method that an array has."""
    if type(function) is _Method:
        return isinstance(args[0], _OF_ARRAYS)
    return (getattr(function, "__module__", None) or "").startswith("numpy")


def _put_together(value: Any) -> int:
    """Return the bytes of what an argument makes when it is put into one tensor."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= _NUMBER_KINDS:
            return len(value) * _ITEM
        return sum(map(_put_together, value))
    return len(value) * _ITEM if isinstance(value, range) else _ITEM


def _bound(values: Iterable[Any]) -> float:
    """Return a number that the items of a result hardly exceed."""
    bound = 1.0
    for value in values:
        if isinstance(value, torch.Tensor | np.ndarray):
            bound *= max(int(math.prod(value.shape)), 1)
        elif isinstance(value, int | float | np.number):
            bound *= max(abs(float(value)), 1.0) if value == value else 1.0
        elif isinstance(value, list | tuple):
            bound *= max(_of_list(value), 1.0)
        elif isinstance(value, str | slice | torch.dtype | torch.device | bool) or value is None:
            continue
        elif hasattr(type(value), "__len__"):
            bound *= max(len(value), 1)
        if bound == math.inf:
            return bound
    return bound


def _of_list(value: list[Any] | tuple[Any, ...]) -> float:
    """Return a bound for a list: of sizes, of tensors, of numbers, or of lists that are alike."""
    if not value:
        return 1.0
    if len(value) <= _MOST_SIZES and all(isinstance(one, int) for one in value):
        return math.prod(max(abs(float(one)), 1.0) for one in value) * len(value)
    first, num = value[0], 1.0
    if isinstance(first, torch.Tensor | np.ndarray):
        return float(sum(math.prod(one.shape) for one in value if isinstance(one, torch.Tensor | np.ndarray)))
    inner: Any = value
    while isinstance(inner, list | tuple) and inner and num < math.inf:
        num *= len(inner)
        inner = inner[0]
    return num


def _same_shapes(args: Iterable[Any]) -> int:
    """Return the numbers in all tensors together if their shapes are the same and no number is a size."""
    shape, num = None, 0
    for one in args:
        if isinstance(one, torch.Tensor):
            if shape is not None and one.shape != shape:
                return 0
            shape = one.shape
            num += one.numel()
        elif isinstance(one, list | tuple) or (type(one) is int and abs(one) > 64):
            return 0
    return num


def _of_pair(operator: str, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return how many numbers an operator's result has."""
    if operator == "@" and left and right:
        rows, columns = left[:-1], right[-1:] if len(right) > 1 else ()
        batch = _of_pair("+", left[:-2], right[:-2])
        return batch * math.prod(rows[-1:]) * math.prod(columns)
    num = 1
    for at in range(1, max(len(left), len(right)) + 1):
        num *= max(left[-at] if at <= len(left) else 1, right[-at] if at <= len(right) else 1)
    return num


def _of_arrays(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], bound: float, left: int) -> int:
    """Return the bytes of the result of a function of numpy."""
    if name in _SQUARES:
        num = _of_square(args, kwargs) * _ITEM
        return num if num > left else 0
    if bound * _ITEM <= left and name not in _SQUARING:
        return 0
    shapes = [np.shape(one) for one in (*args, *kwargs.values()) if isinstance(one, np.ndarray)]
    if len(shapes) == 2 and name in {"matmul", "dot"}:
        return _of_pair("@", *shapes) * _ITEM
    if name not in _PRODUCTS and name not in _SQUARING and not _could_grow(args, kwargs):
        with contextlib.suppress(ValueError):
            return math.prod(np.broadcast_shapes(*shapes)) * _ITEM
    if bound * bound * _ITEM > left and (bound * _ITEM > left or (name in _SQUARING and bound > 2**15)):
        raise refusal(f"`{name}` of numpy on so much", "use torch")
    return 0


def _of_square(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return how many numbers a matrix made from one or two sizes, or from the rows of another, may have."""
    first, *rest = args or (0,)
    if isinstance(first, int):
        second = kwargs.get("M") or next((one for one in rest[:1] if isinstance(one, int)), None)
        return abs(first * (first if second is None else second))
    return int(max(np.shape(first), default=1)) ** 2


def _could_grow(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(
        (type(one) is int and one > 64) or (isinstance(one, list | tuple))
        for one in (*args, *kwargs.values())
    )


def _tried(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of a function's result, found out on the meta device."""
    if any(isinstance(one, list | tuple) and len(one) > _MOST_TENSORS for one in (*args, *kwargs.values())):
        raise NotImplementedError
    on_meta = {name: _on_meta(one) for name, one in kwargs.items()}
    has_tensors = any(map(_has_tensor, (*args, *kwargs.values())))
    if not has_tensors or "device" in on_meta:
        on_meta["device"] = "meta"
    on_meta.pop("out", None)
    on_meta.pop("generator", None)
    with torch.no_grad():
        result = function(*map(_on_meta, args), **on_meta)
    return sum(one.numel() * one.element_size() for one in _tensors_in(result))


def _largest(*values: Any) -> list[int]:
    """Return the largest number in each tensor of whole numbers."""
    return [
        int(one.max())
        for one in (np.asarray(value) if type(value) in {list, tuple} else value for value in values)
        if isinstance(one, torch.Tensor | np.ndarray)
        and 0 not in tuple(one.shape)
        and "float" not in str(one.dtype)
    ]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, torch.Tensor)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_on_meta, value))
    return value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [one for item in value for one in _tensors_in(item)]
    return []
