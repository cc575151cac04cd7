"""``model.lm_head(hidden)`` in a block: computes logits of a value of the block's own.

vLLM's unembedding cannot be called: its weights may be sharded over ranks, its rows are padded, and
``forward`` raises. With tied weights the same module also embeds tokens, when it is called with token ids.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather

from nnsight_engine.envoys.envoy import Envoy


class VocabularyEnvoy(Envoy):
    """The envoy of vLLM's embedding or unembedding."""

    def _apply_to_values(self, *args: Any, **kwargs: Any) -> Any:
        """Unembed ``[..., hidden]``, without scales and soft caps of the model's logits, or embed tokens."""
        first = args[0] if len(args) == 1 and not kwargs else None
        if not (isinstance(first, torch.Tensor) and first.is_floating_point()):
            return super()._apply_to_values(*args, **kwargs)
        module: Any = self._module
        logits = module.quant_method.apply(module, first, bias=getattr(module, "bias", None))
        if module.tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits)
        return logits[..., : module.org_vocab_size]
