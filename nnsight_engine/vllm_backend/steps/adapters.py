"""LoRA adapters: which adapter changes which rows of a projection.

A call by a block uses the adapter of its request. On a CPU, vLLM 0.32 gives rows without adapter the weights
in the last slot; there rows are computed here. No step reads files, see ``AdapterHolds``. Adapters that
change the unembedding are rejected: a lens reads rows of several requests, and vLLM knows adapters only of
sampled rows.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.models import supports_lora
from vllm.v1.core.sched.output import SchedulerOutput

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.compat import brings, params_of
from nnsight_engine.vllm_backend.steps.adapter_checks import (
    CheckedLoRAModel,
    check_config,
    check_weights,
)
from nnsight_engine.vllm_backend.traces.block_adapters import NO_SLOT, BlockAdapters
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY

_VOCABULARY: Final = (LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)
_BEFORE_UNEMBEDDING: Final = "project_out"


class AdaptedRowsMixin(ABC):
    blocks: BlockAdapters
    device: Any
    sampler_indices: torch.Tensor
    token_lora_indices: torch.Tensor
    _spans: Sequence[tuple[int, int, int]] = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)  # type: ignore[misc] # vLLM's wrapper has it
        if self._is_on_cpu:
            slots, counts = torch.unique_consecutive(self.token_lora_indices, return_counts=True)
            stops = counts.cumsum(0)
            starts = stops - counts
            self._spans = list(zip(starts.tolist(), stops.tolist(), slots.tolist(), strict=True))

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Add the adapters' part to the output ``y``, in place.

        ``y`` and ``x`` are ``[rows, width]``; each slice of the output has an A of ``[slots, 1, rank, width
        of x]`` and a B of ``[slots, 1, width of the slice, rank]``.
        """
        # A block calls no compiled module, and reading a thread's variable cannot be compiled.
        slot = None if torch.compiler.is_compiling() else self.blocks.slot()
        if slot is None and not self._is_on_cpu:
            added: torch.Tensor | None = super().add_lora_linear(  # type: ignore[misc] # as above
                y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs
            )
            return added
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for start, stop, index in self._spans if slot is None else [(0, len(x), slot)]:
            if index == NO_SLOT:
                continue
            first = 0
            for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                inner = x[start:stop].float() @ down[index, 0].float().T * scale
                part = y[start:stop, first : first + width]
                part += inner.to(y.dtype) @ up[index, 0].to(y.dtype).T
                first += width
        return None

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Add the adapters' part to the output ``y`` of a classification head.

        ``y`` is ``[requests, labels]``, changed in place, ``x`` is ``[requests, width]``, A is ``[slots, 1,
        rank, width]``, and B is ``[slots, 1, labels, rank]``.
        """
        if not self._is_on_cpu:
            added: torch.Tensor | None = super().add_lora_logits(  # type: ignore[misc] # vLLM's wrapper has it
                y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs
            )
            return added
        for index in self.sampler_indices.unique().tolist():
            if index != NO_SLOT:
                rows = self.sampler_indices == index
                inner = x[rows].float() @ lora_a_stacked[index, 0].float().T * scale
                y[rows] += inner.to(y.dtype) @ lora_b_stacked[index, 0].to(y.dtype).T
        return None

    @property
    def _is_on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"


class _KeptAdapters(LRUCacheLoRAModelManager):
    """Adapters in a worker's memory, of which none is dropped for another."""

    @property
    def capacity(self) -> int:
        return sys.maxsize


class _CheckedAdapters(LRUCacheWorkerLoRAManager):
    _manager_cls = _KeptAdapters
    _adapter_manager: _KeptAdapters

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        check_config(get_adapter_absolute_path(lora_request.lora_path))
        adapter: LoRAModel = super()._load_adapter(lora_request)
        check_weights(adapter, self._adapter_manager)
        return adapter


class AdaptersMixin:
    lora_manager: Any

    def add_adapters_of_blocks(self, scheduled: SchedulerOutput) -> None:
        """Put the adapters of new requests into slots at once: their blocks may call modules early."""
        adapters = {
            request.lora_request.lora_int_id: request.lora_request
            for request in scheduled.scheduled_new_reqs
            if request.lora_request is not None and brings(params_of(request), TRACE_KEY)
        }
        for _, adapter in sorted(adapters.items()):  # in an order on which all ranks agree, as below
            self.add_lora(adapter)  # type: ignore[attr-defined] # vLLM's runner has it

    def _set_active_loras(
        self,
        prompt_lora_mapping: Sequence[int],
        token_lora_mapping: Sequence[int],
        lora_requests: Iterable[LoRARequest],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Put the step's adapters into slots, in an order on which all ranks agree.

        vLLM goes by the order of a set, which differs between processes, and so would the removed adapters. A
        call by a block needs its adapter on all ranks, or on none.
        """
        ordered = sorted(lora_requests, key=lambda one: one.lora_int_id)
        super()._set_active_loras(prompt_lora_mapping, token_lora_mapping, ordered, *args, **kwargs)  # type: ignore[misc] # vLLM's runner has it

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        """Wrap the model's projections.

        Raises:
            ValueError: vLLM takes no adapters of the model.
            UnsupportedOptionError: An adapter could change the unembedding, or what comes before it.
        """
        if not supports_lora(model):
            raise ValueError(
                f"vLLM takes no LoRA adapters of {type(model).__name__}: leave out --enable-lora"
            )
        for module in model.modules():
            if getattr(module, "embedding_modules", None):
                module.embedding_modules = {}  # type: ignore[assignment] # an attribute of vLLM's classes
        self.lora_manager = _CheckedAdapters(vllm_config, device, model.embedding_modules, CheckedLoRAModel)
        adapted: nn.Module = self.lora_manager.create_lora_manager(model, vllm_config)
        manager: Any = adapted.lora_manager
        for name, module in manager.modules.items():
            if isinstance(module, _VOCABULARY) or name.endswith(_BEFORE_UNEMBEDDING):
                raise UnsupportedOptionError(
                    f"--enable-lora with adapters of {name} is not supported: a lens could not use the "
                    "adapter of each request; name others with --lora-target-modules"
                )
        blocks = BlockAdapters(lambda: manager.lora_index_to_id)
        for wrapper in manager.punica_wrapper_mapping.values():
            cls = type(wrapper)
            wrapper.__class__ = type(f"Intervention{cls.__name__}", (AdaptedRowsMixin, cls), {})
            wrapper.blocks = blocks
        manager.block_adapters = blocks
        return adapted
