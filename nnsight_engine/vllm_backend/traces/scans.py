"""Scans: ordinary requests of which only shapes are kept, since vLLM's kernels run on real values only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.vllm_backend.traces.caches import RequestCache

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.request import TracedRequest

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
    if isinstance(value, tuple):
        return tuple(map(_data_of, value))
    if isinstance(value, list):
        return [*map(_data_of, value)]
    if isinstance(value, dict):
        return {name: _data_of(item) for name, item in value.items()}
    return value if isinstance(value, torch.Tensor | int | float | str | bool | None) else None
