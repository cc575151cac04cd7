"""Caches of blocks in the serving engine: a request's rows of many modules' values, sent to the client.

Filled on the model's side, after all blocks have had a value, with positions that are computed for the first
time. The chunks of a prompt are concatenated per module, so a cache has whole values, or its request an
error. A scan is an ordinary request of which only shapes are kept, since vLLM's kernels run on real values
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core import model_spec as leaf_names
from nnsight_engine.core.trees import map_pairs, map_tensors
from nnsight_engine.envoys.architectures.named_points import PointGroup
from nnsight_engine.envoys.cache import Cache, CacheView, Entry
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError
from nnsight_engine.vllm_backend.traces.memory_accounting import CACHES, MemoryAccount
from nnsight_engine.vllm_backend.traces.points import ATTENTION_INPUT, Layers, Part
from nnsight_engine.vllm_backend.traces.spans import joined

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.envoys.tree import EnvoyTree
    from nnsight_engine.families.layout import EngineFamily
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.request import TracedRequest


class RequestCache(Cache):
    """A cache made by a request's block; it accounts for its memory and can be read with standard names."""

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        detach: bool = True,
    ) -> None:
        """Store tensors on ``device``, as ``dtype``; RuntimeError if there is no such device here."""
        torch.empty(0, device=device, dtype=dtype)  # raises now, at the line that made the cache
        super().__init__(device=device, dtype=dtype, detach=detach)
        self.spend: Callable[[int], None] = _spends_nothing

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor, counting its bytes towards the request's limit; one on the meta device has none."""
        if self.device is None or torch.device(self.device).type != "meta":
            self.spend(tensor.nbytes)
        with torch.inference_mode(mode=False):  # the receiver may edit it
            return super()._copied(tensor)

    def view(self, model: Envoy) -> CacheView:
        return EngineCacheView(self, "", model)


class RequestCaches:
    """The caches that a request's blocks have made; values of prompt chunks are parts until the last one."""

    def __init__(self, memory: MemoryAccount) -> None:
        self._memory = memory
        self._by_provider: dict[str, list[RequestCache]] = {}
        # By cache id and provider: for each call of a step, the rows of the chunks so far.
        self._parts: dict[tuple[int, str], list[list[Any]]] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._step = 0

    def add(self, cache: RequestCache, providers: Iterable[str]) -> None:
        cache.spend = self._spend
        for provider in providers:
            self._by_provider.setdefault(provider, []).append(cache)

    def has_use_for(self, provider: str) -> bool:
        return provider in self._by_provider

    def begin_step(self) -> None:
        """Begin a step: reset the call counts of modules."""
        self._step += 1
        self._calls.clear()

    def drop_parts(self) -> None:
        """Drop stored parts: the prompt is complete."""
        self._parts.clear()

    def note(self, provider: str, rows: Any, chunk: int, *, is_last: bool) -> None:
        """Cache new rows of a provider, or store them as a part; a prompt's last part completes the value.

        ``chunk`` counts the prompt's chunks computed before; ``is_last``: none follows. Raises
        ChunkedPromptError if the first chunks passed before the cache was made, and TraceBytesError.
        """
        for cache in self._by_provider[provider]:
            key = (id(cache), provider)
            call_number = self._calls[key] = self._calls.get(key, -1) + 1
            if is_last and not chunk:
                cache.keep(provider, (self._step, call_number), rows)
                continue
            parts_by_call = self._parts.setdefault(key, [])
            while len(parts_by_call) <= call_number:
                parts_by_call.append([])
            parts = parts_by_call[call_number]
            if len(parts) != chunk:
                if is_last:
                    raise ChunkedPromptError.reading(provider, chunk + 1)
                continue
            if not is_last:
                parts.append(map_tensors(rows, self._copied_part))
                continue
            for part in reversed(parts):
                rows = map_pairs(part, rows, joined)
            cache.keep(provider, (self._step, call_number), rows)

    def _copied_part(self, tensor: torch.Tensor) -> torch.Tensor:
        self._spend(tensor.nbytes)
        with torch.inference_mode(mode=False):
            return tensor.clone()

    def _spend(self, num_bytes: int) -> None:
        self._memory.keep(CACHES, num_bytes)
        self._memory.check()


class EngineCacheView(CacheView):
    """A view of a block's cache in vLLM: modules by their paths, and point values by standard names.

    ``cache.model.layers[3].output`` is the residual stream, one tensor, as in a block. The module's own value
    is at ``cache["model.model.layers.3"].output``.
    """

    def _value(self, name: str) -> Any:
        is_standard = isinstance(self._envoy, Part) and name != "inputs"
        return self._standard(name) if is_standard else super()._value(name)

    def _below(self, envoy: Any) -> Any:
        """Return the view of a child, which is a module or a part of the standard names; points have none."""
        if isinstance(envoy, Layers):
            points = envoy.points
            return type(self)(self._cache, f"{points.root.path}.{points.family.layers}", envoy)
        if isinstance(envoy, PointGroup) and not isinstance(envoy, Part):
            raise AttributeError(  # noqa: TRY004 - a cache raises this for unknown names
                f"{envoy!r} are no module, and a cache has modules; save their values"
            )
        return super()._below(envoy)

    def _tree(self) -> EnvoyTree | None:
        if isinstance(self._envoy, Layers):
            return self._envoy.points.root
        return self._envoy.owner.root if isinstance(self._envoy, Part) else super()._tree()

    def _holds_numbered(self) -> bool:
        return isinstance(self._envoy, Layers) or super()._holds_numbered()

    def _standard(self, side: str) -> Any:
        """Return the input or output (``side``) at the standard name of this view, one tensor per call."""
        part: Part = self._envoy
        prefix, points = part.place, part.owner
        family = points.family
        is_layer = prefix.count(".") == 1  # "layers.3", and not "layers.3.attn"
        if prefix == _NORM or is_layer:
            entry = self._entry()
            if side == "input" and prefix != _NORM:
                _ = entry.inputs  # raises, with advice, if there are none
                inputs = entry.values["input"]
                pairs = [
                    (family.hidden_of(*arguments), family.residual_of(*arguments)) for arguments in inputs
                ]
                return _formed(pairs, lambda pair: _tensor(pair, family, is_stream=True))
            is_stream = family.returns_residual and (prefix != _NORM or side == "input")
            return _formed(_values(entry, side), lambda value: _tensor(value, family, is_stream=is_stream))
        _, layer, group = prefix.split(".", 2)  # "layers.3.attn"
        view = self
        if f"{group}.{side}" == ATTENTION_INPUT:  # attention has more arguments, in varying order
            projection = points.layout.blocks[int(layer)].leaves[leaf_names.QUERIES].path
            path = f"{points.root.path}.{family.layers}.{layer}.{projection}"
            view = type(self)(self._cache, path, None)
        values = _values(view._entry(), side)  # noqa: SLF001 - a view like this one
        return _formed(values, lambda value: _tensor(value, family, is_stream=False))


def _values(entry: Entry, side: str) -> list[Any]:
    """Return the outputs, or the arguments, of all calls of a module; raises if the cache has none."""
    if side == "output":
        _ = entry.output  # raises, with advice, if there are none
        return entry.values["output"]
    _ = entry.inputs  # the same for inputs
    return [(*args, *kwargs.values()) for args, kwargs in entry.values["input"]]


def _formed(values: list[Any], form: Callable[[Any], Any]) -> Any:
    formed = [form(value) for value in values]
    return formed[0] if len(formed) == 1 else formed


def _tensor(value: Any, family: EngineFamily, *, is_stream: bool) -> torch.Tensor:
    """Return a value as a block has it: a stream in two tensors is their sum, and a batch axis is removed."""
    items = value if isinstance(value, tuple) else (value,)
    tensor: torch.Tensor = items[0]
    residual = items[1] if is_stream and len(items) > 1 else None
    if residual is not None:
        tensor = tensor + residual
    return tensor[0] if family.is_batched else tensor


def _spends_nothing(num_bytes: int) -> None: ...


HOME_CLASSES: Final = (Cache, RequestCache, CacheView, EngineCacheView, Entry)
"""Classes that may be sent to the client beside plain data: they hold data and nothing else."""

_NORM: Final = "norm"


_KEYS = ("input", "output")


def scanned(request: TracedRequest, model: WorkerModel) -> RequestCache:
    """Return a cache that records the shapes of all values that a request's rows pass."""
    cache = RequestCache(device="meta")
    names = [f"{path}.{key}" for path, _ in model.named_modules() for key in _KEYS]
    request.watch(cache, [name for name in names if request.dispatcher.refusal(name) is None])
    return cache


def first_values(cache: RequestCache) -> dict[str, dict[str, Any]]:
    """Return the first value of each module, by path and side; objects that are not data are left out."""
    return {
        path: {key: _data_of(values[0]) for key, values in entry.values.items()}
        for path, entry in cache.entries.items()
    }


def _data_of(value: Any) -> Any:
    """Return tensors and plain data, which can be sent to the client; other objects become None."""
    if isinstance(value, tuple):
        return tuple(map(_data_of, value))
    if isinstance(value, list):
        return [*map(_data_of, value)]
    if isinstance(value, dict):
        return {name: _data_of(item) for name, item in value.items()}
    return value if isinstance(value, torch.Tensor | int | float | str | bool | None) else None
