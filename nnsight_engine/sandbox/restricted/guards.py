"""What changed code calls: items, operators and calls are measured and asked for here, attributes one below.

One ``Guards`` serves the code of one message. It gives out no object that leads further.
"""

from __future__ import annotations

import functools
import operator
import random
import string
import types
from _string import formatter_field_name_split  # type: ignore[import-not-found] # as `string` does
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NoReturn

import numpy as np
import torch

from nnsight_engine.core import untrusted_frames
from nnsight_engine.envoys.architectures.named_points import NamedPoints, PointGroup
from nnsight_engine.envoys.cache import CacheView
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.sandbox.restricted.arguments import plain
from nnsight_engine.sandbox.restricted.attributes import CLASSES, AttributeRules
from nnsight_engine.sandbox.restricted.budget import Budget, refusal
from nnsight_engine.sandbox.restricted.engine import given, is_tokenizer, taken
from nnsight_engine.sandbox.restricted.names import MAGIC
from nnsight_engine.sandbox.restricted.sizes import charge_result, check_format, size_of
from nnsight_engine.sandbox.restricted.tables import PLAIN
from nnsight_engine.sandbox.restricted.tokenizers import Tokenizing
from nnsight_engine.sandbox.restricted.views import ClassView, Lazy
from nnsight_engine.sandbox.restricted.whole_numbers import SLOW

_BINARY: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<<": operator.lshift, ">>": operator.rshift, "|": operator.or_,
    "^": operator.xor, "&": operator.and_, "@": operator.matmul,
}  # fmt: skip
_INPLACE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv,
    "//": operator.ifloordiv, "%": operator.imod, "**": operator.ipow, "<<": operator.ilshift,
    ">>": operator.irshift, "|": operator.ior, "^": operator.ixor, "&": operator.iand, "@": operator.imatmul,
}  # fmt: skip
_UNARY: Final[Mapping[str, Callable[[Any], Any]]] = {
    "-": operator.neg, "+": operator.pos, "~": operator.invert
}  # fmt: skip
_COMPARE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
    "in": lambda item, values: item in values, "not in": lambda item, values: item not in values,
}  # fmt: skip
_FREE: Final = frozenset({float, bool, type(None), complex})
"""Types whose operators make nothing large, whatever the other side is but a tensor."""
_SMALL_INT: Final = 2**31
_COPIED: Final = (list, tuple, str, bytes)
_LARGE_IN_A_CHAIN: Final = 1024
_CALLABLE: Final = frozenset({functools.partial, ClassView})
_FOR_CODE: Final = frozenset(
    {
        "abc", "contextlib", "dataclasses", "enum", "functools", "operator", "random", "statistics", "typing",
        "torch.autograd.grad_mode", "torch.amp.autocast_mode",
    }
)  # fmt: skip
_OURS: Final = "nnsight_engine.sandbox.restricted."


def _is_for_code(module: Any) -> bool:
    """Tell whether what is defined in a module, and is in the code's hands, was given to it to be called."""
    return module in _FOR_CODE or (isinstance(module, str) and module.startswith(_OURS))


class Guards(AttributeRules):
    """The guards of one message's code.

    Attributes:
        builtins: What its functions find under names that are neither theirs nor their module's.
        handed_out: Functions written in C that were given to it, by identity, such as builtins.
    """

    def __init__(self, budget: Budget, engine: Mapping[type, Collection[str]]) -> None:
        """Begin with no code; the arguments are those of ``AttributeRules``."""
        super().__init__(budget, engine)
        self.builtins: dict[str, Any] = {}
        self.handed_out: set[int] = set()
        self._formatter = _Formatter(self)
        self._functions: dict[type, Callable[[Any], bool]] = {
            types.BuiltinFunctionType: self._is_builtin,
            types.FunctionType: self._is_function,
            types.MethodType: self._is_method,
            types.MethodWrapperType: lambda function: function.__name__ in MAGIC,
        }

    # Items, operators, calls.

    def item(self, owner: Any, key: Any) -> Any:  # noqa: PLR0911 - one for each kind of object
        """Return an item."""
        kind = type(owner)
        if kind is dict:
            return owner[key]
        if isinstance(owner, torch.Tensor):
            if type(key) is int or type(key) is slice or (type(key) is tuple and not any(map(_is_many, key))):
                return owner[key]
            return self.sizer.call("index", operator.getitem, (owner, key), {})
        if kind in _COPIED:
            return charge_result(self.meter, owner[key]) if type(key) is slice else owner[key]
        if isinstance(owner, np.ndarray):
            return charge_result(self.meter, owner[plain(key, self.meter, of_numpy=True)])
        if issubclass(kind, Envoy) and isinstance(key, str):
            return self.get(owner, key)
        if (
            issubclass(kind, CacheView)
            and isinstance(key, str)
            and any(one.startswith("_") for one in key.split("."))
        ):
            raise KeyError(key)
        return owner[key]

    def store_item(self, value: Any, owner: Any, key: Any) -> None:
        """Assign an item."""
        if type(owner) is list and type(key) is slice:
            value = self.spread(value)
        if isinstance(owner, torch.Tensor | np.ndarray):
            of_numpy = not isinstance(owner, torch.Tensor)
            key = plain(key, self.meter, of_numpy=of_numpy)
            value = plain(value, self.meter, of_numpy=of_numpy)
        elif isinstance(owner, NamedPoints) or type(owner).__module__.startswith("transformers."):
            value = given(value, self.own)
        owner[key] = value

    def several(self, owner: Any) -> Any:
        """Return what takes an item for an owner when several things are assigned at once."""
        return owner if type(owner) in {list, dict} or type(owner) in self.own else _Storing(self, owner)

    def one(self, key: Any) -> Any:
        """Return the key of an item that is assigned together with others."""
        if type(key) is slice and not (key.start is None and key.stop is None and key.step is None):
            raise refusal("a slice among several things that are assigned", "assign it by itself")
        return key

    def binary(self, sign: str, left: Any, right: Any) -> Any:
        """Return ``left + right``, and so on."""
        self._check_operands(sign, left, right)
        return _BINARY[sign](left, right)

    def inplace(self, sign: str, left: Any, right: Any) -> Any:
        """Return what ``left += right`` binds."""
        self._check_operands(sign, left, right)
        if isinstance(left, list) and sign == "+":
            right = self.spread(right)
        return _INPLACE[sign](left, right)

    def _check_operands(self, sign: str, left: Any, right: Any) -> None:
        left_kind, right_kind = type(left), type(right)
        if left_kind in _FREE and right_kind in _FREE:
            return
        if left_kind is int and right_kind is int and sign not in {"**", "<<"}:  # noqa: SIM102 - as below
            if sign not in SLOW or (-_SMALL_INT < left < _SMALL_INT and -_SMALL_INT < right < _SMALL_INT):
                return
        self.sizer.operands(sign, left, right)

    def unary(self, sign: str, value: Any) -> Any:
        """Return ``-value``, and so on."""
        return self.counted(_UNARY[sign](value))

    def compare(self, sign: str, left: Any, right: Any) -> Any:
        """Return ``left < right``, and so on."""
        if isinstance(left, torch.Tensor | np.ndarray) or isinstance(right, torch.Tensor | np.ndarray):
            many = (torch.Tensor, np.ndarray)
            if isinstance(right, np.ndarray) or (isinstance(left, np.ndarray) and not sign.endswith("in")):
                left, right = (plain(one, self.meter, of_numpy=True) for one in (left, right))
            if isinstance(left, (*many, int, float)) and isinstance(right, (*many, int, float)):
                self.sizer.operands("+", left, right)
        elif sign in {"in", "not in"} and isinstance(right, _COPIED):
            self.meter.take_steps(len(right) // 64)
        elif sign in {"in", "not in"} and isinstance(right, range) and type(left) is not int:
            self.meter.take_steps(len(right))
        return _COMPARE[sign](left, right)

    def small(self, value: Any) -> Any:
        """Return an operand of a chain of comparisons."""
        if isinstance(value, torch.Tensor | np.ndarray) and size_of(value) > _LARGE_IN_A_CHAIN * 8:
            raise refusal("a chain of comparisons of large tensors", "compare twice, and use `&`")
        return value

    def begin_attribute(self, owner: Any, name: str) -> tuple[Any, Any, Any, bool]:
        """Read what ``owner.name += …`` changes."""
        return owner, name, self.get(owner, name), True

    def begin_item(self, owner: Any, key: Any) -> tuple[Any, Any, Any, bool]:
        """Read what ``owner[key] += …`` changes."""
        return owner, key, self.item(owner, key), False

    def finish(self, sign: str, begun: tuple[Any, Any, Any, bool], right: Any) -> None:
        """Compute it, and store it."""
        owner, key, value, is_attribute = begun
        new = self.inplace(sign, value, right)
        if is_attribute:
            self.store(new, owner, key)
        else:
            self.store_item(new, owner, key)

    def callee(self, function: Any) -> Any:
        """Return what is to be called for it.

        Raises:
            SandboxError: It is nothing for code to call.
        """
        kind = type(function)
        if kind in _CALLABLE or kind in self.own:
            return function
        is_allowed = self._functions.get(kind)
        if is_allowed is None:
            found = self._stand_in(function, kind)
            if found is not None:
                return found
        elif is_allowed(function):
            return function
        what = f"`{function.__name__}`" if is_allowed is not None else f"a `{kind.__name__}`"
        raise refusal(f"calling {what}")

    def _stand_in(self, function: Any, kind: type) -> Any:
        """Return what is called for an object that is no function; None if nothing is."""
        if issubclass(kind, (Envoy, PointGroup, torch.nn.Module, *self._engine)):
            return functools.partial(self._applied, function)
        if issubclass(kind, type):
            if function in self.own:
                return self.maker(function)
            is_known = issubclass(function, Exception | np.number | np.bool_) or function in CLASSES
            return function if is_known else None
        if is_tokenizer(kind):
            return Tokenizing(self, function, "__call__")
        is_known = _is_for_code(kind.__module__) or not callable(function) or issubclass(kind, Barrier)
        return function if is_known else None

    def _is_function(self, function: types.FunctionType) -> bool:
        """Tell whether a function is the code's own, or one that was given to it."""
        is_own = getattr(function, "__builtins__", None) is self.builtins
        return is_own or _is_for_code(function.__globals__.get("__name__"))

    def _is_method(self, function: types.MethodType) -> bool:
        """Tell whether a method is of an object that is the code's own, or that it was given."""
        owner = function.__self__
        kind = type(owner)
        if kind in self._rules or kind in self.own or _is_for_code(kind.__module__):
            return True
        return isinstance(owner, type) and owner in self.own

    def hand_out(self, functions: Iterable[Any]) -> None:
        """Let functions written in C be called."""
        self.handed_out.update(map(id, functions))

    def refuse_call(self) -> NoReturn:
        """Refuse a call of one of the model's modules that a library made for the code.

        Raises:
            SandboxError: Always.
        """
        raise refusal("having a library call a module of the model", "call it yourself")

    def _is_builtin(self, function: types.BuiltinFunctionType) -> bool:
        """Tell whether a function written in C was handed out, or is an object's that code may have."""
        if id(function) in self.handed_out:
            return True
        owner = function.__self__
        kind = type(owner)
        rules = self._rules.get(kind)
        if rules is None:
            rules = self._learn(kind)
        return rules.get(function.__name__) is PLAIN or kind is random.Random

    @untrusted_frames.vetting
    def _applied(self, envoy: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a module of the model to tensors and numbers."""
        args, kwargs = given(args, self.own), given(kwargs, self.own)
        return charge_result(self.meter, taken(envoy(*args, **kwargs)))

    # Strings and containers.

    def counted(self, value: Any) -> Any:
        """Count a result's bytes, and return it."""
        return charge_result(self.meter, value)

    def formatted(self, value: Any, conversion: int, spec: str) -> str:
        """Return a part of an f-string."""
        if conversion == ord("r"):
            value = repr(value)
        elif conversion == ord("s"):
            value = str(value)
        elif conversion == ord("a"):
            value = ascii(value)
        if spec:
            self.meter.charge(check_format(spec))
        return str(self.counted(format(value, spec)))

    def joined(self, parts: tuple[str, ...]) -> str:
        """Put an f-string together."""
        self.meter.charge(sum(map(len, parts)))
        return "".join(parts)

    def formatted_text(self, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return ``text.format(...)``, whose fields are asked for like any others."""
        self.meter.charge(check_format(text) + len(text) + 64 * text.count("{"))
        return str(self.counted(self._formatter.vformat(text, args, kwargs)))

    def displayed(self, num: int, value: Any) -> Any:
        """Count a list, tuple, set or dict that is written out, of so many items."""
        self.meter.charge(num * 8)
        return value

    def spread(self, values: Any) -> Any:
        """Return the items of ``*values``, counted."""
        if isinstance(values, list | tuple | dict | set | frozenset | str | bytes | range):
            self.meter.take_steps(len(values) // 64)
            self.meter.charge(len(values) * 8)
            return values
        return self.counted(tuple(values))

    def spread_keys(self, values: Any) -> Any:
        """Return ``**values``, counted."""
        if isinstance(values, Mapping):
            self.meter.take_steps(len(values) // 64)
            self.meter.charge(len(values) * 64)
        return values

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """Return a list of items, counted."""
        return list(self.spread(values))

    def lazily(self, values: Iterable[Any]) -> Lazy:
        """Return an iterator that counts its steps."""
        return Lazy(values, self.step)


class _Storing:
    """Takes an item for an owner that is not to be given just any."""

    __slots__ = ("_guards", "_owner")

    def __init__(self, guards: Guards, owner: Any) -> None:
        self._guards = guards
        self._owner = owner

    def __setitem__(self, key: Any, value: Any) -> None:
        self._guards.store_item(value, self._owner, key)


def _is_many(part: Any) -> bool:
    """Tell whether a part of an index picks many items by their numbers."""
    return not (type(part) in {int, slice} or part is None or part is ...)


class _Formatter(string.Formatter):
    """``str.format`` whose fields go through the guards."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Return what a field names."""
        first, rest = formatter_field_name_split(field_name)
        found = self.get_value(first, args, kwargs)
        for is_attribute, key in rest:
            found = self._guards.get(found, key) if is_attribute else self._guards.item(found, key)
        return found, first

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a value, not too wide."""
        self._guards.meter.charge(check_format(format_spec))
        return str(format(value, format_spec))


__all__ = ["Guards"]
