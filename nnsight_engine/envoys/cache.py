"""Caches: the values of many modules kept in one go, found by the modules' paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.narrowing import narrowed
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.envoys.cache_display import cache_html

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.interleaving.interleaver import Interleaver


_VALUES: Final = frozenset({"output", "inputs", "input"})


class Entry:
    """What one module took and gave; lists, one item per call, if it was called more than once."""

    def __init__(self) -> None:
        """Start without values."""
        self.values: dict[str, list[Any]] = {}

    def _get(self, key: str, option: str) -> Any:
        if key not in self.values:
            raise AttributeError(f"this cache keeps no {key}s; make it with tracer.cache({option}=True)")
        kept = self.values[key]
        return kept[0] if len(kept) == 1 else kept

    @property
    def output(self) -> Any:
        """The module's output."""
        return self._get("output", "include_output")

    @property
    def inputs(self) -> Any:
        """The module's inputs, ``(args, kwargs)``."""
        return self._get("input", "include_inputs")

    @property
    def input(self) -> Any:
        """The module's first argument."""
        kept = self.values.get("input")
        if kept is None:
            return self._get("input", "include_inputs")
        firsts = [args[0] if args else next(iter(kwargs.values()), None) for args, kwargs in kept]
        return firsts[0] if len(firsts) == 1 else firsts

    def __repr__(self) -> str:
        """Say what is kept."""
        return f"Entry({', '.join(f'{key} x{len(kept)}' for key, kept in self.values.items())})"


class Cache:
    """Collects values, as the blocks leave them.

    Values are copied: what a model later does to a tensor in place does not reach the cache.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        detach: bool = True,
    ) -> None:
        """Keep tensors there, in that type, cut off from autograd or not."""
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
        """Collect these keys of these modules from now on.

        Raises:
            ValueError: A path is not one of the model's, or nothing is to be kept.
        """
        if not keys:
            raise ValueError("a cache that includes neither inputs nor outputs would stay empty")
        known = {str(envoy.path): envoy for envoy in model._walk()}
        if modules is None:
            paths = list(known)
        else:
            paths = [module if isinstance(module, str) else str(module.path) for module in modules]
            unknown = [path for path in paths if path not in known]
            if unknown:
                raise ValueError(f"{unknown[0]!r} is not a module of this model; print(model) shows them")
        self.rows = interleaver.current.batch_group if interleaver.current is not None else None
        self.batcher = interleaver.batcher
        interleaver.watch(self, [f"{path}.{key}" for path in paths for key in keys])

    def add(self, provider: str, iteration: int | None, value: Any) -> None:  # noqa: ARG002 - a Watcher's
        """Keep a copy of the value at hand, narrowed to the rows of the invoke that made the cache."""
        self.keep(provider, self.batcher.narrow(self.rows))

    def keep(self, provider: str, rows: Any) -> None:
        """Keep a copy of one call's value."""
        path, _, key = provider.rpartition(".")
        entry = self.entries.setdefault(path, Entry())
        entry.values.setdefault(key, []).append(map_tensors(rows, self._copied))

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach() if self.detach else tensor
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else None
        kept = source if dtype is None else narrowed(source, dtype, what=f"a cache keeps values in {dtype}")
        return kept.to(device=self.device, copy=kept is source)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is kept; how it was gathered means nothing elsewhere."""
        own = ("device", "dtype", "detach", "entries")
        return {name: self.__dict__[name] for name in own}

    def view(self, model: Envoy) -> CacheView:
        """Return the values as seen from the model's root."""
        return CacheView(self, "", model)


class CacheView(Mapping[str, Entry]):
    """A cache, or the part of it at and below one module.

    ``cache["model.layers.3"]`` and ``cache.model.layers[3]`` are the same place.
    """

    def __init__(self, cache: Cache, path: str, envoy: Any) -> None:
        """Look at ``path`` of the cache; ``envoy`` stands there, or at the root for an empty path."""
        self._cache = cache
        self._path = path
        self._envoy = envoy

    @property
    def output(self) -> Any:
        """The output of the module here."""
        return self._value("output")

    @property
    def inputs(self) -> Any:
        """The inputs of the module here, ``(args, kwargs)``."""
        return self._value("inputs")

    @property
    def input(self) -> Any:
        """The first argument of the module here."""
        return self._value("input")

    def _value(self, name: str) -> Any:
        return getattr(self._entry(), name)

    def _entry(self) -> Entry:
        entry = self._cache.entries.get(self._path)
        if entry is None:
            raise AttributeError(
                f"the cache has no value for {self._path or 'its root'}: the module was not asked for, or "
                "was not called after the cache was made"
            )
        return entry

    def __getitem__(self, key: Any) -> Any:
        """Return the entry at a path, or the view of a child of a list of modules by its number."""
        if isinstance(key, str) and not self._path:
            if key not in self._cache.entries:
                raise KeyError(
                    f"{key!r} is not in the cache, which has {', '.join(self._cache.entries) or 'nothing'}"
                )
            return self._cache.entries[key]
        return self._below(self._envoy[key])

    def __getattr__(self, name: str) -> Any:
        """Return the view of a child, by any name that the envoy knows it by."""
        if name.startswith("__") or "_path" not in self.__dict__:  # not put together yet, by copy for one
            raise AttributeError(name)
        if name in _VALUES:
            return self._value(name)  # whose error made Python ask here; it says more than any other
        if not self._path:
            root = str(self._envoy.path)
            if name == root:
                return type(self)(self._cache, root, self._envoy)
            raise AttributeError(f"a cache starts at {root!r}: cache.{root}...; got {name!r}")
        return self._below(getattr(self._envoy, name))

    def _below(self, envoy: Any) -> Any:
        if isinstance(envoy, list):
            return [self._below(one) for one in envoy]
        return type(self)(self._cache, str(envoy.path), envoy)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the paths that have values."""
        prefix = f"{self._path}."
        return (path for path in self._cache.entries if not self._path or f"{path}.".startswith(prefix))

    def __len__(self) -> int:
        """Return how many modules have values here."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """Say where this is and how much there is."""
        return f"CacheView({self._path or 'all'}: {len(self)} modules)"

    def _repr_html_(self) -> str:
        return cache_html(repr(self), {path: self._cache.entries[path].values for path in self})
