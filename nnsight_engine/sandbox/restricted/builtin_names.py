"""Python's builtin names for code: the harmless ones, some measured; the rest refuse to be called."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch

from nnsight_engine.sandbox.restricted import names
from nnsight_engine.sandbox.restricted.budget import Stop, refusal
from nnsight_engine.sandbox.restricted.codecs import check_codec
from nnsight_engine.sandbox.restricted.guards import Guards
from nnsight_engine.sandbox.restricted.names import names_in
from nnsight_engine.sandbox.restricted.views import ClassView, real
from nnsight_engine.sandbox.restricted.whole_numbers import (
    divide_with_rest,
    make_int,
    power_modulo,
    rounded,
)

_AS_THEY_ARE: Final = names_in(
    """
    ascii bin bool callable chr complex float hash hex id next oct ord slice
    NotImplemented Ellipsis True False None __build_class__ super
    """
)
_NUMBERS: Final = frozenset({int, float, bool})
_NOT_FOR_CODE: Final = frozenset({"BaseExceptionGroup", "ExceptionGroup"})


def builtins_for(guards: Guards) -> dict[str, Any]:
    """Return the builtins of code that these guards look after."""
    found: dict[str, Any] = {
        name: _Refused(name) for name in vars(builtins) if not name.startswith("_") and name.isidentifier()
    }
    found |= {
        name: kind
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, Exception) and name not in _NOT_FOR_CODE
    }
    found |= {name: getattr(builtins, name) for name in _AS_THEY_ARE}
    guards.hand_out(getattr(builtins, name) for name in [*_AS_THEY_ARE, "len"])
    guards.builtins |= found | _classes(guards) | _functions(guards) | _guards(guards)
    return guards.builtins


class _Refused:
    """A builtin that is none here; whoever calls it is told."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise refusal(f"`{self._name}`")


def _guards(guards: Guards) -> dict[str, Any]:
    return {
        names.STEP: guards.step,
        names.GET: guards.get,
        names.STORE: guards.store,
        names.SET: guards.settable,
        names.DELETE: guards.deletable,
        names.BEGIN_ATTRIBUTE: guards.begin_attribute,
        names.BEGIN_ITEM: guards.begin_item,
        names.FINISH: guards.finish,
        names.ITEM: guards.item,
        names.STORE_ITEM: guards.store_item,
        names.ONE: guards.one,
        names.SLICE: slice,
        names.BINARY: guards.binary,
        names.UNARY: guards.unary,
        names.INPLACE: guards.inplace,
        names.COMPARE: guards.compare,
        names.SMALL: guards.small,
        names.FORMATTED: guards.formatted,
        names.JOINED: guards.joined,
        names.SPREAD: guards.spread,
        names.SPREAD_KEYS: guards.spread_keys,
        names.CALLEE: guards.callee,
        names.OF_SUPER: guards.of_super,
        names.BASE: guards.base,
        names.DEFINED: guards.defined,
        names.LEAVING: guards.leaving,
        names.STOP: Stop,
        names.TOLD: guards.meter.told,
        names.DONE: guards.meter.finish,
        names.SEVERAL: guards.several,
        names.DISPLAYED: guards.displayed,
        names.REFUSE_CALL: guards.refuse_call,
    }


def _classes(guards: Guards) -> dict[str, Any]:  # noqa: C901 - of many small functions
    """Return the classes whose objects could be large, or which have attributes that are not for code."""

    def collected(kind: Any) -> Callable[..., Any]:
        def make(values: Any = ()) -> Any:
            return guards.counted(kind(guards.spread(values)))

        return make

    def make_dict(*args: Any, **kwargs: Any) -> Any:
        return guards.counted(dict(*map(guards.spread, args), **kwargs))

    def make_str(value: Any = "", *rest: Any, **kwargs: Any) -> str:
        if rest or kwargs:
            check_codec(*rest, **kwargs)
        return str(guards.counted(str(value, *rest, **kwargs)))

    def make_bytes(value: Any = b"", *rest: Any) -> bytes:
        if isinstance(value, int):
            guards.meter.charge(max(value, 0))
        elif isinstance(value, str):
            check_codec(*rest)
        return bytes(value, *rest) if isinstance(value, int | str | bytes) else bytes(guards.listed(value))

    def make_range(*args: Any) -> range:
        made = range(*args)
        num = 0 if not made else (made[-1] - made[0]) // made.step + 1
        if num > guards.meter.steps_left:
            guards.meter.out_of_steps()
        return made

    def make_property(
        fget: Any = None, fset: Any = None, fdel: Any = None, doc: str | None = None
    ) -> property:
        fget, fset, fdel = (_callee_or_none(guards, one) for one in (fget, fset, fdel))
        return property(fget, fset, fdel, doc)

    def fromkeys(keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(guards.spread(keys), value)

    views = {
        "list": ClassView(list, collected(list)),
        "tuple": ClassView(tuple, collected(tuple)),
        "set": ClassView(set, collected(set)),
        "frozenset": ClassView(frozenset, collected(frozenset)),
        "dict": ClassView(dict, make_dict, {"fromkeys": fromkeys}),
        "str": ClassView(str, make_str),
        "bytes": ClassView(bytes, make_bytes),
        "int": ClassView(int, make_int),
        "range": ClassView(range, make_range),
        "object": ClassView(object, object, is_base=True),
        "property": ClassView(property, make_property),
        "staticmethod": ClassView(staticmethod, lambda function: staticmethod(guards.callee(function))),
        "classmethod": ClassView(classmethod, lambda function: classmethod(guards.callee(function))),
    }
    guards.classes.update((view.kind, view) for view in views.values())
    return views | {"type": guards.kind_of}


def _functions(guards: Guards) -> dict[str, Any]:  # noqa: C901 - the same
    """Return the functions that go through containers, look attributes up, or print."""

    def each(function: Any, *values: Any) -> Any:
        called = guards.callee(function)
        return guards.lazily(map(called, *values))

    def keep(function: Any, values: Any) -> Any:
        called = guards.callee(function) if function is not None else None
        return guards.lazily(filter(called, values))

    def ordered(values: Any, *, key: Any = None, reverse: bool = False) -> list[Any]:
        return sorted(guards.listed(values), key=_callee_or_none(guards, key), reverse=reverse)

    def extreme(function: Callable[..., Any]) -> Callable[..., Any]:
        def found(*args: Any, key: Any = None, **kwargs: Any) -> Any:
            every = guards.listed(args[0]) if len(args) == 1 else args
            return function(every, key=_callee_or_none(guards, key), **kwargs)

        return found

    def total(values: Any, start: Any = 0) -> Any:
        every = guards.listed(values)
        if all(type(one) in {int, float, bool} for one in every) and type(start) in {int, float, bool}:
            return sum(every, start)
        for one in every:
            guards.step()
            start = guards.binary("+", start, one)
        return start

    def some(values: Any) -> bool:
        return any(guards.lazily(values))

    def every(values: Any) -> bool:
        return all(guards.lazily(values))

    def power(base: Any, exponent: Any, modulus: Any = None) -> Any:
        return (
            guards.binary("**", base, exponent) if modulus is None else power_modulo(base, exponent, modulus)
        )

    def absolute(value: Any) -> Any:
        return abs(value) if type(value) in _NUMBERS else guards.counted(abs(value))

    def round_(value: Any, *places: Any, **named: Any) -> Any:
        if type(value) is float and not places and not named:
            return round(value)
        return guards.counted(rounded(value, *places, *named.values()))

    def divmod_(left: Any, right: Any) -> Any:
        if isinstance(left, int | float) and isinstance(right, int | float):
            return divide_with_rest(left, right)
        return guards.binary("//", left, right), guards.binary("%", left, right)

    def kind_check(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def check(value: Any, kind: Any) -> bool:
            return function(real(value) if function is issubclass else value, real(kind))

        return check

    def say(*values: Any, sep: str | None = " ", end: str | None = "\n", **_kwargs: Any) -> None:
        text = (" " if sep is None else sep).join(map(str, values))
        print(guards.counted(text), end=end)  # noqa: T201 - a block's prints are its user's

    def vars_of(value: Any) -> dict[str, Any]:
        if type(value) not in guards.own:
            raise refusal("`vars` of what is not an object of your own class")
        if isinstance(value, torch.nn.Module):
            raise refusal("`vars` of a layer", "name the attribute")
        return dict(vars(value))

    return {
        "abs": absolute,
        "all": every,
        "any": some,
        "delattr": lambda owner, name: delattr(guards.deletable(owner, name), name),
        "dir": guards.names_of,
        "divmod": divmod_,
        "enumerate": lambda values, start=0: guards.lazily(enumerate(values, start)),
        "filter": keep,
        "format": lambda value, spec="": guards.formatted(value, -1, spec),
        "getattr": guards.guarded_getattr,
        "hasattr": guards.guarded_hasattr,
        "isinstance": kind_check(isinstance),
        "issubclass": kind_check(issubclass),
        "iter": lambda values, *sentinel: guards.lazily(iter(values, *sentinel)),
        "len": len,
        "map": each,
        "max": extreme(max),
        "min": extreme(min),
        "pow": power,
        "print": say,
        "repr": lambda value: guards.counted(repr(value)),
        "reversed": lambda values: guards.lazily(reversed(values)),
        "round": round_,
        "setattr": guards.guarded_setattr,
        "sorted": ordered,
        "sum": total,
        "vars": vars_of,
        "zip": lambda *values, strict=False: guards.lazily(zip(*values, strict=strict)),
    }


def _callee_or_none(guards: Guards, function: Any) -> Any:
    return None if function is None else guards.callee(function)


__all__ = ["builtins_for"]
