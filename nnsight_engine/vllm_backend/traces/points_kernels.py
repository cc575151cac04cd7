"""Probes for attention kernels that a model calls by their ``forward``, which module probes do not see.

vLLM's Transformers backend does so; ``forward`` is replaced on the instance while the model runs in a traced
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch

from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


class KernelProbes:
    """Offers the arguments of kernel calls as ``<path>.input``."""

    def __init__(self, kernels: Iterable[tuple[torch.nn.Module, str]], dispatcher: TraceDispatcher) -> None:
        self._kernels = list(kernels)
        self._dispatcher = dispatcher

    def install(self) -> None:
        for module, path in self._kernels:
            vars(module)["forward"] = self._probe(f"{path}.input", module.forward)

    def remove(self) -> None:
        for module, _ in self._kernels:
            del vars(module)["forward"]

    def _probe(self, provider: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher = self._dispatcher

        def attend(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == dispatcher.listener:
                args, kwargs = dispatcher.provide(provider, (args, kwargs))
            return forward(*args, **kwargs)

        return attend
