"""What code finds in Python's own modules: harmless functions as they are, others measured or replaced."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import random
import statistics
import time
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import torch

from nnsight_engine.sandbox.restricted.budget import refusal
from nnsight_engine.sandbox.restricted.guards import Guards
from nnsight_engine.sandbox.restricted.names import names_in
from nnsight_engine.sandbox.restricted.views import Base, ClassView
from nnsight_engine.sandbox.restricted.whole_numbers import check_int


class Library:
    """Python's own modules for one message's code."""

    def __init__(self, guards: Guards) -> None:
        """Offer what these guards look after."""
        self._guards = guards
        self._random = random.Random()  # noqa: S311 - for arithmetic

    def members(self) -> dict[str, Callable[[str], Any]]:
        """Return what finds the members of each module; it raises KeyError for others."""
        return {
            "math": self._of_math,
            "collections": lambda name: self._collections()[name],
            "collections.abc": lambda name: _known_class(collections.abc, name),
            "itertools": self._of_itertools,
            "functools": lambda name: self._functools()[name],
            "operator": self._of_operator,
            "typing": self._of_typing,
            "time": lambda name: self._handed_out({one: getattr(time, one) for one in _TIME}[name]),
            "random": self._of_random,
            "statistics": lambda name: {one: getattr(statistics, one) for one in _STATISTICS}[name],
            "dataclasses": lambda name: self._dataclasses()[name],
            "contextlib": lambda name: self._contextlib()[name],
            "enum": lambda name: self._enum()[name],
            "abc": lambda name: {"ABC": ClassView(ABC, ABC, is_base=True), "abstractmethod": abstractmethod}[
                name
            ],
        }

    def _of_math(self, name: str) -> Any:
        if name in {"comb", "factorial", "perm"}:
            function = getattr(math, name)

            def bounded(*args: int) -> int:
                if any(abs(one) > _MOST_FACTORS for one in args):
                    raise refusal(f"`math.{name}` of more than {_MOST_FACTORS:,}", "use math.lgamma")
                return int(function(*args))

            return bounded
        if name in {"prod", "sumprod", "ldexp"}:
            raise KeyError(name)
        if name.startswith("_"):
            raise KeyError(name)
        if name in {"gcd", "lcm", "isqrt"}:
            return self._of_short_ints(getattr(math, name))
        return self._handed_out(vars(math)[name])

    def _of_short_ints(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            return int(check_int(function(*map(check_int, args))))

        return call

    def _handed_out(self, function: Any) -> Any:
        if isinstance(function, types.BuiltinFunctionType):
            self._guards.hand_out([function])
        return function

    def _collections(self) -> dict[str, Any]:
        guards = self._guards

        def default(factory: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = (
                factory.kind
                if isinstance(factory, ClassView) and factory.kind in _PLAIN_FACTORIES
                else factory
            )
            return collections.defaultdict(
                made if made is None or isinstance(made, type) else guards.callee(made), *args, **kwargs
            )

        def named(typename: str, field_names: Any, *, rename: bool = False, defaults: Any = None) -> Any:
            return guards.defined(
                collections.namedtuple(typename, field_names, rename=rename, defaults=defaults)
            )

        def made(kind: Any) -> Callable[..., Any]:
            def make(*args: Any, **kwargs: Any) -> Any:
                return guards.counted(
                    kind(
                        *(guards.spread(one) if not isinstance(one, int | None) else one for one in args),
                        **kwargs,
                    )
                )

            return make

        return {
            "Counter": self._guards.viewed(collections.Counter, made(collections.Counter)),
            "OrderedDict": self._guards.viewed(collections.OrderedDict, made(collections.OrderedDict)),
            "deque": self._guards.viewed(collections.deque, made(collections.deque)),
            "defaultdict": self._guards.viewed(collections.defaultdict, default),
            "namedtuple": named,
        }

    def _of_itertools(self, name: str) -> Any:
        if name not in _ITERTOOLS:
            raise KeyError(name)
        function, guards = getattr(itertools, name), self._guards
        if name == "tee":
            return lambda values, n=2: tuple(iter(guards.listed(values)) for _ in range(min(n, 64)))

        def made(*args: Any, **kwargs: Any) -> Any:
            if name in {"product", "permutations", "combinations", "combinations_with_replacement"}:
                args = tuple(one if isinstance(one, int) else guards.listed(one) for one in args)
                if any(isinstance(one, int) and one > _MOST_AT_ONCE for one in (*args, *kwargs.values())):
                    raise refusal(f"`itertools.{name}` of more than {_MOST_AT_ONCE} at once")
            if name == "accumulate" and len(args) == 1 and kwargs.get("func") is None:
                kwargs["func"] = functools.partial(guards.binary, "+")
            kwargs = {key: guards.callee(one) for key, one in kwargs.items()}
            return guards.lazily(function(*(guards.callee(one) for one in args), **kwargs))

        if name == "chain":
            return ClassView(itertools.chain, made, {"from_iterable": self._chained})
        return made

    def _chained(self, values: Any) -> Any:
        return self._guards.lazily(itertools.chain.from_iterable(values))

    def _functools(self) -> dict[str, Any]:
        guards = self._guards

        def reduce(function: Any, values: Any, *start: Any) -> Any:
            return functools.reduce(guards.callee(function), guards.lazily(values), *start)

        def partial(function: Any, *args: Any, **kwargs: Any) -> Any:
            return functools.partial(guards.callee(function), *args, **kwargs)

        def wraps(_wrapped: Any) -> Any:
            return lambda function: function

        def cached(function: Any = None, **_options: Any) -> Any:
            if function is None:
                return cached
            return functools.lru_cache(maxsize=1024)(guards.callee(function))

        return {"reduce": reduce, "partial": partial, "wraps": wraps, "lru_cache": cached, "cache": cached}

    def _of_operator(self, name: str) -> Any:
        guards = self._guards
        if name in _SIGNS:
            return functools.partial(guards.binary, _SIGNS[name])
        if name in _ORDERS:
            return functools.partial(guards.compare, _ORDERS[name])
        if name == "neg":
            return functools.partial(guards.unary, "-")
        if name == "getitem":
            return guards.item
        if name == "itemgetter":
            return lambda *keys: (
                lambda owner: (
                    guards.item(owner, keys[0])
                    if len(keys) == 1
                    else tuple(guards.item(owner, key) for key in keys)
                )
            )
        raise KeyError(name)

    def _of_typing(self, name: str) -> Any:
        if name in {"Generic", "NamedTuple", "Protocol"}:
            return Base(object if name == "Generic" else getattr(typing, name))
        if name in _TYPING:
            return _Annotation(name) if name != "cast" else lambda _kind, value: value
        if name == "TYPE_CHECKING":
            return False
        raise KeyError(name)

    def _of_random(self, name: str) -> Any:
        if name == "choices":
            return self._choices
        if name not in _RANDOM:
            raise KeyError(name)
        return getattr(self._random, name)

    def _choices(self, population: Any, weights: Any = None, *, cum_weights: Any = None, k: int = 1) -> Any:
        self._guards.meter.take_steps(max(k, 0))
        return self._random.choices(population, weights, cum_weights=cum_weights, k=k)

    def _dataclasses(self) -> dict[str, Any]:
        guards = self._guards

        def dataclass(kind: Any = None, **options: Any) -> Any:
            if options.keys() - {"init", "repr", "eq", "order", "frozen", "unsafe_hash", "kw_only"}:
                raise refusal("this option of `dataclass`")
            if kind is None:
                return functools.partial(dataclass, **options)
            if kind not in guards.own or issubclass(kind, torch.nn.Module):
                raise refusal("`dataclass` of a class that is not your own, or of a layer")
            return dataclasses.dataclass(**options)(kind)

        def of_own(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(value: Any, **changes: Any) -> Any:
                if type(value) not in guards.own and value not in guards.own:
                    raise refusal(f"`{function.__name__}` of what is not an object of your own class")
                return function(value, **changes)

            return call

        def fields(value: Any) -> Any:
            return tuple(_Field(one.name) for one in of_own(dataclasses.fields)(value))

        def asdict(value: Any) -> dict[str, Any]:
            return {one.name: getattr(value, one.name) for one in of_own(dataclasses.fields)(value)}

        guards.own.add(_Field)
        return {
            "dataclass": dataclass,
            "field": dataclasses.field,
            "replace": of_own(dataclasses.replace),
            "asdict": asdict,
            "astuple": lambda value: tuple(asdict(value).values()),
            "fields": fields,
            "is_dataclass": dataclasses.is_dataclass,
        }

    def _contextlib(self) -> dict[str, Any]:
        guards = self._guards
        return {
            "nullcontext": functools.partial(contextlib.nullcontext),
            "suppress": functools.partial(contextlib.suppress),
            "contextmanager": lambda function: contextlib.contextmanager(guards.callee(function)),
        }

    def _enum(self) -> dict[str, Any]:
        return {
            "Enum": ClassView(Enum, _no_enum, is_base=True),
            "IntEnum": ClassView(IntEnum, _no_enum, is_base=True),
            "auto": functools.partial(enum.auto),
        }


class _ByValue(enum.EnumMeta):
    """Calls an enum with a value alone: with names it would make another class, with methods of any name."""

    def __call__(cls, value: Any, *names: Any, **how: Any) -> Any:
        if names or how:
            raise refusal(f"`{cls.__name__}(...)` with names", "write a `class` statement")
        return super().__call__(value)


class Enum(enum.Enum, metaclass=_ByValue):
    """``enum.Enum`` for code."""


class IntEnum(enum.IntEnum, metaclass=_ByValue):
    """``enum.IntEnum`` for code."""


for _kind in (Enum, IntEnum):
    _kind.__module__ = "enum"  # as which it travels


class _Annotation:
    """A word of annotations, which mean nothing at run time."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> _Annotation:
        return self

    def __getitem__(self, _arguments: Any) -> _Annotation:
        return self

    def __or__(self, _other: Any) -> _Annotation:
        return self

    def __ror__(self, _other: Any) -> _Annotation:
        return self

    def __repr__(self) -> str:
        return f"typing.{self._name}"


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field of a dataclass, by name."""

    name: str


def _known_class(module: types.ModuleType, name: str) -> ClassView:
    if name not in module.__all__:
        raise KeyError(name)
    return ClassView(getattr(module, name), lambda *_args: _refuse_abstract(name))


def _refuse_abstract(name: str) -> None:
    raise TypeError(f"{name} is for annotations and isinstance")


def _no_enum(*_args: Any, **_kwargs: Any) -> None:
    raise refusal("`Enum(...)`", "write a `class` statement")


_PLAIN_FACTORIES: Final = frozenset({list, dict, set, tuple, str, int})


_MOST_FACTORS: Final = 5000


_MOST_AT_ONCE: Final = 64


_TIME: Final = (
    "monotonic",
    "perf_counter",
    "time",
    "process_time",
    "time_ns",
    "perf_counter_ns",
    "monotonic_ns",
)


_STATISTICS: Final = ("fmean", "mean", "median", "mode", "pstdev", "pvariance", "stdev", "variance")


_ITERTOOLS: Final = names_in(
    """
    accumulate batched chain combinations combinations_with_replacement compress count cycle dropwhile
    filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest
    """
) & frozenset(vars(itertools))


_RANDOM: Final = names_in(
    """
    betavariate choice expovariate gauss normalvariate randint random randrange sample seed shuffle
    triangular uniform
    """
)


_TYPING: Final = names_in(
    """
    Annotated Any Callable ClassVar Dict Final FrozenSet Iterable Iterator List Literal Mapping NewType
    NoReturn Optional Self Sequence Set Tuple Type TypeAlias TypeVar Union cast
    """
)


_SIGNS: Final = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and_": "&", "or_": "|", "xor": "^",
}  # fmt: skip


_ORDERS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
