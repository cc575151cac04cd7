"""Attention probabilities for blocks; vLLM never computes them, so they are computed beside its attention.

Queries and keys are intercepted at the kernel's input, after rotary embedding and per-head norms;
probabilities are float32 (see ``plans/patterns``). Earlier keys are only in the engine's KV cache, so if a
block reads a layer's pattern from the prompt on, the layer's keys are stored until it ends.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.envoys.architectures.errors import PatternError
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.plans.step.patterns import AttentionKeyStore, ComputePattern
from nnsight_engine.vllm_backend.attention_hooks import attention_form

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


class WorkerPatternPoint:
    """The attention probabilities of one layer, ``[heads, tokens, keys]``; read only."""

    def __init__(self, name: str, kernel: Envoy, num_heads: tuple[int, int], shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = shape
        self._kernel = kernel
        # Not the module's own numbers, which are those of one rank.
        self._num_heads, self._num_kv_heads = num_heads
        self._kept: weakref.WeakKeyDictionary[Mediator, AttentionKeyStore] = weakref.WeakKeyDictionary()

    def read(self) -> torch.Tensor:
        """Wait for the queries and the keys, and return the probabilities.

        PatternError if the attention cannot be recomputed on this rank, the layer shares another layer's
        keys, or keys of earlier steps were not stored.
        """
        module: Any = self._kernel._module  # noqa: SLF001 - an envoy of ours
        args, kwargs = self._kernel.inputs
        query, key = (*args, kwargs.get("query"), kwargs.get("key"))[:2]
        try:
            form = attention_form(module)
        except InterventionError as error:
            raise PatternError(f"{self.name}: {error.message}") from error
        if form.slopes is not None and len(form.slopes) < self._num_heads:
            raise PatternError(f"{self.name}: each rank has the position biases of its own heads only")
        if key is None:
            raise PatternError(f"{self.name}: the layer shares another layer's keys")
        queries = query.reshape(-1, self._num_heads, module.head_size)
        keys = key.reshape(-1, self._num_kv_heads, module.head_size)
        mediator = self._kernel.interleaver.current
        assert mediator is not None  # noqa: S101 - it has just been answered
        start = self._start(mediator, len(queries))
        store = self._store(mediator, start, keys)
        rows = torch.arange(len(queries), device=query.device)
        stop = start + len(queries)
        out = torch.zeros(len(queries), self._num_heads, stop, dtype=torch.float32, device=query.device)
        positions = list(range(start, stop))
        ComputePattern(store, form, rows, rows + start, positions, out).run(queries, None)
        return out.transpose(0, 1)

    def write(self, value: torch.Tensor) -> NoReturn:
        """Raise PatternError: probabilities cannot be written."""
        del value
        raise PatternError(
            f"{self.name} cannot be written: vLLM's attention never forms the probabilities, they are "
            "computed beside it. Write attn.q, attn.k or attn.v before it, or attn.heads behind it"
        )

    def _start(self, mediator: Mediator, num_rows: int) -> int:
        """Return the position of the first row; a prompt in chunks is given whole at its last chunk."""
        request: Any = mediator.interleaver
        stop: int = request.done + request.batcher.group[1]
        return stop - num_rows

    def _store(self, mediator: Mediator, start: int, keys: torch.Tensor) -> AttentionKeyStore:
        stop = start + len(keys)
        store = self._kept.get(mediator)
        before = 0 if store is None else store.capacity
        if start and (store is None or store.num_keys < start):
            raise PatternError(
                f"{self.name}: a generated token attends to all positions before it, and the keys of those "
                "were not kept. Read the pattern in every step, from the prompt on"
            )
        if store is None:
            store = self._kept[mediator] = AttentionKeyStore(keys.new_empty(2 * stop, *keys.shape[1:]))
        elif store.capacity < stop:
            store.move_to(keys.new_empty(2 * stop, *keys.shape[1:]))
        store.put(start, keys)
        request: Any = mediator.interleaver
        request.memory.keep("keys", (store.capacity - before) * keys[:1].nbytes)
        return store
