"""The modules that code may import, and what it finds in them: lists of names, and how each is given.

Most functions are given as they are. Those of torch and numpy are measured (``sizes``); classes come as
views; ``itertools`` counts its items; what leaves memory as it found it makes zeros.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import enum
import functools
import importlib.util
import itertools
import math
import random
import statistics
import time
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.sandbox.restricted import torch_names
from nnsight_engine.sandbox.restricted.budget import refusal
from nnsight_engine.sandbox.restricted.guards import Guards
from nnsight_engine.sandbox.restricted.names import names_in
from nnsight_engine.sandbox.restricted.views import Base, ClassView, ModuleView

_HOMES: Final[Mapping[str, str]] = {
    "_collections": "collections", "_functools": "functools", "_operator": "operator", "_random": "random",
    "torch._tensor": "torch", "torch.functional": "torch", "torch._C._VariableFunctions": "torch",
    "torch.nn.parameter": "torch.nn", "torch.autograd.grad_mode": "torch", "torch._C": "torch",
    "torch._C._linalg": "torch.linalg", "torch._C._nn": "torch.nn.functional", "torch._C._fft": "torch.fft",
    "torch._C._special": "torch.special", "nnsight": "nnsight_engine",
    "nnsight_engine.core.saves": "nnsight_engine", "einops.einops": "einops",
    "torch.amp.autocast_mode": "torch",
    "numpy._core.fromnumeric": "numpy", "numpy._core.multiarray": "numpy", "numpy._core.numeric": "numpy",
}  # fmt: skip
"""Where what is defined elsewhere is found."""
_OF_LAYERS: Final = "torch.nn.modules."

Members = Mapping[str, Callable[[], Any]]


class Modules:
    """The modules of one message's code; members are made when they are first asked for."""

    def __init__(self, guards: Guards, builtins: Mapping[str, Any]) -> None:
        """Offer what these guards look after."""
        self._guards = guards
        self._random = random.Random()  # noqa: S311 - for arithmetic
        self._found: dict[tuple[str, str], Any] = {}
        self._views: dict[str, ModuleView] = {}
        self._members: dict[str, Callable[[str], Any]] = {
            "builtins": lambda name: _public(builtins, name),
            "torch": self._of_torch,
            "torch.nn": self._of_nn,
            "torch.nn.functional": self._measured(torch.nn.functional, torch_names.FUNCTIONAL),
            "torch.linalg": self._measured(torch.linalg, torch_names.LINALG),
            "torch.fft": self._measured(torch.fft, torch_names.FFT),
            "torch.special": self._measured(torch.special, torch_names.SPECIAL),
            "torch.cuda": lambda name: {"is_available": lambda: False}[name],
            "torch.autograd": self._measured(torch.autograd, frozenset({"grad"})),
            "numpy": self._of_numpy,
            "numpy.linalg": self._measured(np.linalg, torch_names.NUMPY_LINALG),
            "math": self._of_math,
            "collections": lambda name: self._collections()[name],
            "collections.abc": lambda name: _known_class(collections.abc, name),
            "itertools": self._of_itertools,
            "functools": lambda name: self._functools()[name],
            "operator": self._of_operator,
            "typing": self._of_typing,
            "time": lambda name: {one: getattr(time, one) for one in _TIME}[name],
            "random": self._of_random,
            "statistics": lambda name: {one: getattr(statistics, one) for one in _STATISTICS}[name],
            "dataclasses": lambda name: self._dataclasses()[name],
            "contextlib": lambda name: self._contextlib()[name],
            "enum": lambda name: self._enum()[name],
            "abc": lambda name: {"ABC": ClassView(ABC, ABC, is_base=True), "abstractmethod": abstractmethod}[
                name
            ],
            _OUTPUTS: self._of_outputs,
            "nnsight_engine": lambda name: {"save": guards.save}[name],
        }
        if importlib.util.find_spec("einops") is not None:
            self._members["einops"] = self._of_einops

    def imported(self, path: str, name: str | None = None) -> Any:
        """Return what an import binds.

        Raises:
            SandboxError: The module or the member is none for code.
        """
        view = self.view(path)
        if name is None:
            return view
        return self._guards.of_view(view, name)

    def find(self, path: str, name: str) -> Any:
        """Return what a message means by a name in a module; attributes of it are separated by dots."""
        path = self._home(path)
        found: Any = self.view(path)
        for part in name.split(".") if name else []:
            if isinstance(found, ModuleView):
                found = self.imported(found.path, part)
            else:
                found = self._guards.get(found, part)
        return found

    def view(self, path: str) -> ModuleView:
        """Return a module.

        Raises:
            SandboxError: It is none for code.
        """
        view = self._views.get(path)
        if view is None:
            if path not in self._members:
                raise refusal(f"the module `{path}`", f"there are {', '.join(sorted(self._shown()))}")
            view = self._views[path] = ModuleView(path, functools.partial(self._member, path))
        return view

    def _home(self, path: str) -> str:
        return "torch.nn" if path.startswith(_OF_LAYERS) else _HOMES.get(path, path)

    def _shown(self) -> list[str]:
        return [path for path in self._members if path not in {"builtins", _OUTPUTS}]

    def _member(self, path: str, name: str) -> Any:
        if (path, name) not in self._found:
            below = f"{path}.{name}"
            self._found[path, name] = (
                self.view(below) if below in self._members else self._members[path](name)
            )
        return self._found[path, name]

    # torch and numpy.

    def _measured(self, module: types.ModuleType, names: frozenset[str]) -> Callable[[str], Any]:
        def find(name: str) -> Any:
            if name not in names:
                raise KeyError(name)
            return self._call(name, getattr(module, name))

        return find

    def _call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose result is measured."""
        call = self._guards.sizer.call

        def measured(*args: Any, **kwargs: Any) -> Any:
            return call(name, function, args, kwargs)

        measured.__name__ = name
        return measured

    def _of_torch(self, name: str) -> Any:
        if name in torch_names.EMPTY:
            return self._call(name, getattr(torch, torch_names.EMPTY[name]))
        if name in torch_names.FUNCTIONS:
            return self._call(name, getattr(torch, name))
        if name in torch_names.CONSTANTS or isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in torch_names.CLASSES:
            kind = getattr(torch, name)
            return self._class(kind, kind)
        if name == "Tensor":
            return self._class(torch.Tensor, self._new_tensor)
        raise KeyError(name)

    def _class(self, kind: type, make: Callable[..., Any], *, is_base: bool = False) -> ClassView:
        view = self._guards.classes[kind] = ClassView(kind, make, is_base=is_base)
        return view

    def _new_tensor(self, *args: Any) -> torch.Tensor:
        """Make a tensor of sizes, of zeros, or of numbers."""
        call = self._guards.sizer.call
        if args and all(type(one) is int for one in args):
            made: torch.Tensor = call("zeros", torch.zeros, args, {})
        else:
            made = call("tensor", torch.tensor, args or ([],), {"dtype": torch.get_default_dtype()})
        return made

    def _of_nn(self, name: str) -> Any:
        if name == "Parameter":
            return self._class(torch.nn.Parameter, torch.nn.Parameter)
        if name not in torch_names.LAYERS:
            raise KeyError(name)
        kind = getattr(torch.nn, name)
        return self._class(kind, functools.partial(self._layer, kind), is_base=True)

    def _layer(self, kind: type[torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Make a layer whose weights are not too large."""
        if any(type(one) is int and abs(one) > 1 for one in (*args, *kwargs.values())):
            try:
                shape_only = kind(*args, **{**kwargs, "device": "meta"})
                num_bytes = sum(one.numel() * one.element_size() for one in shape_only.parameters())
            except TypeError:
                num_bytes = 0  # one without weights
            self._guards.meter.charge(num_bytes)
        return kind(*args, **kwargs)

    def _of_numpy(self, name: str) -> Any:
        if name in torch_names.NUMPY_EMPTY:
            return self._call(name, getattr(np, torch_names.NUMPY_EMPTY[name]))
        if name == "arange":
            return self._arange
        if name in torch_names.NUMPY_FUNCTIONS:
            return self._call(name, getattr(np, name))
        if name in torch_names.NUMPY_TYPES:
            return getattr(np, name)
        if name == "ndarray":
            return self._class(np.ndarray, lambda *_args: _refuse_array())
        if name in torch_names.NUMPY_CONSTANTS:
            return getattr(np, name)
        raise KeyError(name)

    def _arange(self, *args: Any, **kwargs: Any) -> Any:
        start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3] if args else (0, 0, 1)
        self._guards.meter.charge(
            int(max(0.0, (float(stop) - float(start)) / float(kwargs.get("step", step)))) * 8
        )
        return np.arange(*args, **kwargs)

    def _of_einops(self, name: str) -> Any:
        if name not in {"einsum", "rearrange", "reduce", "repeat"}:
            raise KeyError(name)
        return self._call(name, getattr(importlib.import_module("einops"), name))

    def _of_outputs(self, name: str) -> Any:
        """Return a class of models' results, which a client may send along."""
        kind = getattr(importlib.import_module(_OUTPUTS), name, None)
        if not isinstance(kind, type) or kind.__module__ != _OUTPUTS:
            raise KeyError(name)
        return self._class(kind, kind)

    # The standard library.

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
        return vars(math)[name]

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
            "Counter": self._class(collections.Counter, made(collections.Counter)),
            "OrderedDict": self._class(collections.OrderedDict, made(collections.OrderedDict)),
            "deque": self._class(collections.deque, made(collections.deque)),
            "defaultdict": self._class(collections.defaultdict, default),
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
            if kind not in guards.own:
                raise refusal("`dataclass` of a class that is not your own")
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
            "Enum": ClassView(enum.Enum, _no_enum, is_base=True),
            "IntEnum": ClassView(enum.IntEnum, _no_enum, is_base=True),
            "auto": functools.partial(enum.auto),
        }


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


def _public(found: Mapping[str, Any], name: str) -> Any:
    if not name.isidentifier() or name.startswith("_"):
        raise KeyError(name)
    return found[name]


def _known_class(module: types.ModuleType, name: str) -> ClassView:
    if name not in module.__all__:
        raise KeyError(name)
    return ClassView(getattr(module, name), lambda *_args: _refuse_abstract(name))


def _refuse_abstract(name: str) -> None:
    raise TypeError(f"{name} is for annotations and isinstance")


def _refuse_array() -> None:
    raise refusal("`numpy.ndarray(...)`", "use numpy.zeros")


def _no_enum(*_args: Any, **_kwargs: Any) -> None:
    raise refusal("`Enum(...)`", "write a `class` statement")


_OUTPUTS: Final = "transformers.modeling_outputs"
_PLAIN_FACTORIES: Final = frozenset({list, dict, set, tuple, str})
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
