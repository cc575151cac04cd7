"""What code gives to functions of torch and numpy: numbers, tensors, and lists of nothing else.

Both go through a list in C, and hold a pointer into it while they ask an item for its length or its number;
an item of the code's own could empty the list meanwhile. Arrays of objects call methods by name, and compute
with numbers of any length; arrays of text take what room their type says. So all of these are refused, with
the arguments by which results share memory, are left as they were found, or are sparse: torch does not check
what a sparse tensor says of itself. ``Sizer`` asks for each call, the guards for items and operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.sandbox.restricted.budget import FuelMeter, refusal
from nnsight_engine.sandbox.restricted.views import ClassView

AS_IT_IS: Final = frozenset(
    {
        torch.Tensor, torch.nn.Parameter, int, float, bool, complex, str, type(None), slice, type(...), range,
        torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator,
    }
)  # fmt: skip
_ITEMS: Final = frozenset(
    {int, float, bool, complex, torch.Tensor, torch.nn.Parameter, type(None), slice, type(...)}
)
"""Types whose objects run nothing of the code's own when they are asked for a number."""
_NUMBER_CLASSES: Final = (int, float, bool, complex)
_NUMBERS: Final = "biufc"
"""Kinds of numpy's types that hold no objects and no text."""
_DEEPEST: Final = 32
_LONGEST_WORD: Final = 64
BY_PLACE: Final[Mapping[str, int]] = {"embedding": 4, "norm": 4, "normalize": 4, "tensordot": 3}
"""Functions of torch whose further arguments, ``out`` and ``sparse`` among them, are given by name."""


def plain(  # noqa: PLR0911 - one for each kind of argument
    value: Any, meter: FuelMeter, *, of_numpy: bool = False, depth: int = _DEEPEST
) -> Any:
    """Return an argument as something that runs no code of the sender's: lists are looked through.

    Raises:
        SandboxError: It is, or holds, an object that could.
    """
    kind = type(value)
    if kind in AS_IT_IS:
        if kind is str and of_numpy and depth < _DEEPEST:
            raise refusal("an array of text", "keep text in a list")
        return value
    if kind is list or kind is tuple:
        return _items(value, meter, of_numpy=of_numpy, depth=depth)
    if isinstance(value, np.ndarray | np.generic | np.dtype):
        return of_numbers(value)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple):  # with names
        return _items(tuple(tuple.__iter__(value)), meter, of_numpy=of_numpy, depth=depth)
    if isinstance(value, int):  # an IntEnum's
        return int.__pos__(value)
    found = value.kind if kind is ClassView else value
    if isinstance(found, type) and (found in _NUMBER_CLASSES or issubclass(found, np.number | np.bool_)):
        return found
    name = f"class `{found.__name__}`" if isinstance(found, type) else f"`{kind.__name__}`"
    raise refusal(
        f"giving a {name} to a function of torch or numpy", "give it numbers, tensors or lists of them"
    )


def _items(value: Any, meter: FuelMeter, *, of_numpy: bool, depth: int) -> Any:
    meter.take_steps(len(value) // 64)
    kinds = set(map(type, value))
    if kinds <= _ITEMS:
        if of_numpy and int in kinds:
            _check_range(value)
        return value
    if not depth:
        raise refusal(f"a list of lists, {_DEEPEST} deep, for torch or numpy")
    return type(value)(plain(one, meter, of_numpy=of_numpy, depth=depth - 1) for one in value)


def _check_range(values: Any) -> None:
    """Refuse whole numbers of which numpy would make an array of objects."""
    if any(type(one) is int and not -(2**63) <= one < 2**64 for one in values):
        raise refusal("a whole number of more than 64 bits in an array", "use floats")


def of_numbers(value: Any) -> Any:
    """Return an array, a number or a type of numpy, unless it is of objects or of text."""
    dtype = value if isinstance(value, np.dtype) else value.dtype
    if dtype.kind not in _NUMBERS or dtype.subdtype is not None:
        raise refusal("an array of objects or of text", "keep those in a list; arrays are for numbers")
    return value


def check_torch(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments by which torch writes elsewhere, or makes something sparse."""
    if kwargs.get("out") is not None:
        raise refusal(f"`out=` of `torch.{name}`", "assign the result, or write `out[...] = result`")
    if kwargs.get("sparse") or kwargs.get("sparse_grad"):
        raise refusal(f"a sparse gradient, of `{name}`,", "leave the argument out")
    if name in BY_PLACE and len(args) > BY_PLACE[name]:
        raise refusal(f"`{name}` with so many arguments by their places", "give the later ones by name")


def check_numpy(name: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse types of objects and of text by their names, and results that are left as they were found."""
    if isinstance(function, np.ufunc) and kwargs.get("where", True) is not True and kwargs.get("out") is None:
        raise refusal(f"`where=` of `numpy.{name}` without `out=`", "give `out=`, or use `numpy.where`")
    for word in (*(args[1:] if name == "einsum" else args), *kwargs.values()):
        if type(word) is str:
            _check_word(word)


def _check_word(word: str) -> None:
    """Refuse a word that numpy takes for a type of anything but numbers, or that fills an array."""
    if len(word) > _LONGEST_WORD:
        raise refusal("so long a text for numpy")
    try:
        dtype = np.dtype(word)
    except (TypeError, ValueError, SyntaxError):
        return
    of_numbers(dtype)


def dense(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor, unless it is of another layout than a plain one: torch trusts what those say."""
    if value.layout is not torch.strided:
        raise refusal(f"a tensor of the layout {value.layout}", "sparse tensors are not for the sandbox")
    return value


def as_sizes(values: Any) -> list[Any]:
    """Return arguments for measuring: what stands for one whole number, of numpy or in a tensor, as one."""
    return [_as_size(value) for value in values]


def _as_size(value: Any) -> Any:
    if type(value) in {int, float, str, bool}:
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, torch.Tensor):
        is_size = not value.ndim and not value.dtype.is_floating_point and not value.dtype.is_complex
        return int(value.item()) if is_size and not value.is_meta else value
    if isinstance(value, np.ndarray):
        return int(value) if not value.ndim and value.dtype.kind in "iu" else value
    if type(value) in {list, tuple} and 0 < len(value) <= _LONGEST_WORD:
        return type(value)(map(_as_size, value))
    return value
