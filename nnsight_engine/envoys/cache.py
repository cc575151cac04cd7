"""Caches: copies of the values of many modules, found by the modules' paths; and their display as HTML."""

from __future__ import annotations

import html
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from nnsight_engine.core.read_listener import ReadListener
from nnsight_engine.core.tensors import narrowed
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.envoys.tree import NOT_THERE, EnvoyTree, at_path
from nnsight_engine.interleaving.batching import without_state

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.interleaving.interleaver import Interleaver

_MAX_ITEMS: Final = 8
_MAX_CALLS: Final = 16


def cache_html(title: str, kept: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """Return modules as a foldable list; ``kept`` has by path, then by key, the values of each call."""
    modules = "".join(_module(path, values) for path, values in kept.items())
    return (
        '<div style="font-family: monospace; white-space: pre-wrap">'
        f'<details open><summary>{html.escape(title)}</summary><div style="padding-left: 2em">{modules}</div>'
        "</details></div>"
    )


def _module(path: str, values: Mapping[str, Sequence[Any]]) -> str:
    lines = [line for key, calls in values.items() for line in _lines(key, calls)]
    inner = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
    return (
        f"<details><summary>{html.escape(path)}</summary>"
        f'<div style="padding-left: 2em">{inner}</div></details>'
    )


def _lines(key: str, calls: Sequence[Any]) -> list[str]:
    if len(calls) == 1:
        return [f"{key}: {outline(calls[0])}"]
    shown = [f"{key}, call {number}: {outline(value)}" for number, value in enumerate(calls[:_MAX_CALLS])]
    more = len(calls) - _MAX_CALLS
    return [*shown, f"{key}: {more} more calls"] if more > 0 else shown


def outline(value: Any) -> str:
    """Return a short description of a value, tensors by shape: ``(bfloat16[1, 5, 64], None)``."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        items = [outline(item) for item in value[:_MAX_ITEMS]] + ["…"] * (len(value) > _MAX_ITEMS)
        return f"({', '.join(items)})" if isinstance(value, tuple) else f"[{', '.join(items)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {outline(item)}" for key, item in value.items()) + "}"
    return "None" if value is None else type(value).__name__


_VALUES: Final = frozenset({"output", "inputs", "input"})
_OPTIONS: Final = {"output": "include_output", "input": "include_inputs"}


class Entry:
    """Values of one module, of all its calls: one for each step of a generation."""

    _index: _Index | None = None

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.numbers: dict[str, list[Any]] = {}

    def add(self, key: str, number: Any, value: Any) -> None:
        """Store one call's value; its number pairs outputs with inputs and sorts the calls."""
        self.values.setdefault(key, []).append(value)
        self.numbers.setdefault(key, []).append(number)
        self._index = None

    def _calls(self) -> list[Any]:
        return self._indexed().calls

    def _of_call(self, number: Any) -> Entry:
        """Return an entry with the values of one call only, by its number."""
        entry = Entry()
        for key, index in self._indexed().places.get(number, {}).items():
            entry.add(key, number, self.values[key][index])
        return entry

    def _indexed(self) -> _Index:
        if self._index is None:
            self._index = _Index(self.numbers)
        return self._index

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values, "numbers": self.numbers}

    def _get(self, key: str) -> list[Any]:
        """Return a key's values, one per call; AttributeError if there are none, see ``ReadListener``."""
        if key not in self.values:
            if ReadListener.missing_is_none:
                return [None]
            raise AttributeError(
                f"the cache has no {key} here; store {key}s with tracer.cache({_OPTIONS[key]}=True), and "
                "create the cache before the module runs"
            )
        return self.values[key]

    @property
    def output(self) -> Any:
        """The module's output; a list with one item per call if there were several."""
        return _one_or_all(self._get("output"))

    @property
    def inputs(self) -> Any:
        """The module's inputs, ``(args, kwargs)``; a list with one item per call if there were several."""
        return _one_or_all(self._get("input"))

    @property
    def input(self) -> Any:
        """The module's first argument; a list with one item per call if there were several."""
        return _one_or_all([_first_argument(value) for value in self._get("input")])

    def __repr__(self) -> str:
        return f"Entry({', '.join(f'{key} x{len(values)}' for key, values in self.values.items())})"


class _Index:
    """Where the values of each call are in an entry's lists, by key; and the numbers of all calls, sorted."""

    def __init__(self, numbers: Mapping[str, Sequence[Any]]) -> None:
        self.places: dict[Any, dict[str, int]] = {}
        for key, calls in numbers.items():
            for index, call in enumerate(calls):
                self.places.setdefault(call, {}).setdefault(key, index)
        self.calls = sorted(self.places)


class Cache:
    """Collects copies of values, as they are after the blocks have edited them, with None for KV caches."""

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        detach: bool = True,
    ) -> None:
        """Set how tensors are copied: to which device and dtype (None: their own), detached from autograd."""
        self.device = device
        self.dtype = dtype
        self.detach = detach
        self.entries: dict[str, Entry] = {}

    def watch(
        self,
        interleaver: Interleaver,
        model: Envoy,
        modules: Sequence[Envoy | str] | None,
        keys: Sequence[str],
    ) -> None:
        """Start collecting, from all modules if None; ValueError for an unknown path, or no ``keys``."""
        if not keys:
            raise ValueError("a cache that includes neither inputs nor outputs would stay empty")
        envoys_by_path = {str(envoy.path): envoy for envoy in model._walk()}
        if modules is None:
            paths = list(envoys_by_path)
        elif any(isinstance(module, torch.Tensor) for module in modules):
            raise ValueError(
                "a cache takes modules and their paths, got a value that was read already; write the path of "
                f"logits and samples, '{model.path}.logits'"
            )
        else:
            paths = [module if isinstance(module, str) else str(module.path) for module in modules]
            unknown = [path for path in paths if path not in envoys_by_path]
            if unknown:
                raise ValueError(f"{unknown[0]!r} is not a module of this model; print(model) shows them")
        self.rows = interleaver.current.batch_group if interleaver.current is not None else None
        self.batcher = interleaver.batcher
        interleaver.watch(self, [f"{path}.{key}" for path in paths for key in keys])

    def add(self, provider: str, iteration: int | None, value: Any) -> None:  # noqa: ARG002 - a Watcher's
        """Store a copy of the current value, narrowed to the rows of the invoke that created the cache."""
        self.keep(provider, iteration, self.batcher.narrow_without_state(self.rows))

    def keep(self, provider: str, call: Any, rows: Any) -> None:
        path, _, key = provider.rpartition(".")
        self.entries.setdefault(path, Entry()).add(key, call, map_tensors(rows, self._copied, without_state))

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, as the model may go on to change the tensor in place; see the class's options."""
        source = tensor.detach() if self.detach else tensor
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else None
        converted = (
            source if dtype is None else narrowed(source, dtype, what=f"a cache keeps values in {dtype}")
        )
        return converted.to(device=self.device, copy=converted is source)

    def __getstate__(self) -> dict[str, Any]:
        attributes = ("device", "dtype", "detach", "entries")
        return {name: self.__dict__[name] for name in attributes}

    def view(self, model: Envoy) -> CacheView:
        return CacheView(self, "", model)


class CacheView(Mapping[str, "CacheView"]):
    """A cache, or the part of it at and below one module.

    ``cache["model.layers.3"]`` and ``cache.model.layers[3]`` are the same place, under any name that the
    model knows it by. The whole cache is a mapping by path. A module in it is the list of its calls,
    ``cache.model.lm_head[2].output``; a module with numbered children is the list of those, as in the model.
    """

    _call: Any = None

    def __init__(self, cache: Cache, path: str, envoy: Any, call: Any = None) -> None:
        """View the values at and below ``path``, the model's ``envoy``; those of one ``call``, if given."""
        self._cache = cache
        self._path = path
        self._envoy = envoy
        self._call = call

    @property
    def output(self) -> Any:
        """The output of the module here; a list with one item per call if there were several."""
        return self._value("output")

    @property
    def inputs(self) -> Any:
        """The inputs of the module here, ``(args, kwargs)``; a list with one item per call if several."""
        return self._value("inputs")

    @property
    def input(self) -> Any:
        """The first argument of the module here; a list with one item per call if there were several."""
        return self._value("input")

    def _value(self, name: str) -> Any:
        return getattr(self._entry(), name)

    def _entry(self) -> Entry:
        """Return the values of the module here, or of one call of it; AttributeError if there are none."""
        entry = self._cache.entries.get(self._path)
        if entry is None:
            raise AttributeError(
                f"the cache has no value for {self._path or 'its root'}: the module was not requested, or "
                "was not called after the cache was created"
            )
        return entry if self._call is None else entry._of_call(self._call)

    def __getitem__(self, key: Any) -> Any:
        """Return a place by its path, a child by its key or number, or a call by its number.

        Raises:
            KeyError: There is no value at the path, or below it.
            IndexError: There was no such call.
        """
        if isinstance(key, str):
            return self._at_path(key) if not self._path else self._below(self._child(key))
        if not self._path or self._holds_numbered():
            return self._below(self._envoy[key])
        if isinstance(key, slice):
            return list(self)[key]
        calls = self._calls()
        try:
            return self._at_call(calls[key])
        except IndexError:
            raise IndexError(f"the cache has {len(calls)} calls of {self._path}, got {key}") from None

    def _child(self, path: str) -> Any:
        """Return what the model has at a path below this place; KeyError if it has nothing there."""
        try:
            return self._envoy[path] if "." not in path else at_path(self._envoy, path)
        except NOT_THERE as error:
            raise KeyError(f"{self._path} has no {path!r}") from error

    def _at_path(self, path: str) -> Self:
        """Return the view at a path from the root, in any spelling; KeyError without values there."""
        if path in self._cache.entries:
            return type(self)(self._cache, path, self._envoy_at(path))
        view: Any = self
        try:
            for path_part in path.split("."):
                view = view._part(path_part)
        except (AttributeError, IndexError, TypeError):
            view = None
        if not isinstance(view, type(self)) or not view.keys():
            raise KeyError(
                f"{path!r} is not in the cache, which has {', '.join(self._cache.entries) or 'nothing'}"
            )
        return view

    def _part(self, name: str) -> Any:
        """Return what one part of a path leads to: a name, the number of a child, or that of a call."""
        if not name.isdecimal():
            return getattr(self, name)
        is_child = isinstance(self._envoy, EnvoyTree) and name in self._envoy._names
        return self[name if is_child else int(name)]

    def _envoy_at(self, path: str) -> Any:
        """Return what the model has at a path; None if it has nothing there."""
        tree = self._tree()
        try:
            return None if tree is None else at_path(tree, path)
        except NOT_THERE:
            return None

    def _tree(self) -> EnvoyTree | None:
        return self._envoy if isinstance(self._envoy, EnvoyTree) else None

    def __getattr__(self, name: str) -> Any:
        """Return the view of a child, by its name or by an alias; the whole cache has the root as child."""
        if name.startswith("__") or "_path" not in self.__dict__:  # not initialized yet, for example by copy
            raise AttributeError(name)
        if name in _VALUES:
            return self._value(name)  # its AttributeError led here; raising it again keeps its message
        if not self._path:
            root = str(self._envoy.path)
            if name == root:
                return type(self)(self._cache, root, self._envoy)
            raise AttributeError(f"a cache starts at {root!r}: cache.{root}...; got {name!r}")
        return self._below(getattr(self._envoy, name))

    def _below(self, envoy: Any) -> Any:
        """Return the view of an envoy, or the views of a list of envoys."""
        if isinstance(envoy, list):
            return [self._below(child) for child in envoy]
        if not hasattr(envoy, "path"):
            raise AttributeError(f"{self._path} has no module there, and a cache has modules; got {envoy!r}")
        return type(self)(self._cache, str(envoy.path), envoy)

    def _at_call(self, call: Any) -> Self:
        return type(self)(self._cache, self._path, self._envoy, call)

    def _holds_numbered(self) -> bool:
        """Return whether all children of the module are numbered: indexing and iteration then mean these."""
        envoy = self._envoy
        if self._call is not None or not isinstance(envoy, EnvoyTree):
            return False
        return bool(envoy._names) and all(name.isdecimal() for name in envoy._names)

    def _calls(self) -> list[Any]:
        """Return the numbers of the module's calls that have values; of a single call, its own."""
        entry = self._cache.entries.get(self._path)
        if self._call is not None:
            return [self._call]
        return entry._calls() if entry is not None else []

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the paths that have values; below the root, over the module's calls or its modules."""
        if not self._path:
            return iter(self._cache.entries)
        if self._holds_numbered():
            return (self._below(envoy) for envoy in self._envoy)
        return (self._at_call(call) for call in self._calls())

    def __len__(self) -> int:
        if not self._path:
            return len(self._cache.entries)
        return len(self._envoy) if self._holds_numbered() else len(self._calls())

    def __bool__(self) -> bool:
        """Return True, so that a view without values is not falsy."""
        return True

    def __contains__(self, key: object) -> bool:
        """Return whether there are values at a path; a module list has none of its own."""
        if self._path or not isinstance(key, str):
            return key in self.keys()
        try:
            return self[key]._path in self._cache.entries
        except KeyError:
            return False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheView):
            return NotImplemented
        return (self._cache, self._path, self._call) == (other._cache, other._path, other._call)

    def __hash__(self) -> int:
        return hash((id(self._cache), self._path))

    def keys(self) -> KeysView[str]:
        """Return the paths that have values, at and below this place."""
        return self._views_below().keys()

    def values(self) -> ValuesView[CacheView]:
        """Return the views of the paths, in the order of ``keys``."""
        return self._views_below().values()

    def items(self) -> ItemsView[str, CacheView]:
        """Return pairs of path and view."""
        return self._views_below().items()

    def _views_below(self) -> dict[str, CacheView]:
        """Return the views of all paths with values, at this place and below it."""
        prefix = f"{self._path}."
        return {
            path: type(self)(self._cache, path, self._envoy_at(path))
            for path in self._cache.entries
            if not self._path or f"{path}.".startswith(prefix)
        }

    def __repr__(self) -> str:
        return f"CacheView({self._path or 'all'}: {len(self.keys())} modules)"

    def _repr_html_(self) -> str:
        return cache_html(repr(self), {path: self._cache.entries[path].values for path in self.keys()})


def _first_argument(inputs: tuple[tuple[Any, ...], dict[str, Any]] | None) -> Any:
    args, kwargs = inputs if inputs is not None else ((), {})
    return args[0] if args else next(iter(kwargs.values()), None)


def _one_or_all(calls: list[Any]) -> Any:
    return calls[0] if len(calls) == 1 else calls
