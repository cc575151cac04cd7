"""LoRA adapters: which adapter changes which rows of a projection, and checks before one is loaded.

A call by a block uses the adapter of its request. On a CPU, vLLM 0.32 gives rows without adapter the weights
in the last slot; there rows are computed here. No step reads files, see ``AdapterHolds``. Adapters that
change the unembedding are rejected: a lens reads rows of several requests, and vLLM knows adapters only of
sampled rows. vLLM ignores most of an adapter's configuration, unknown tensors, and wrong shapes: these are
checked here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from abc import ABC
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError
from pydantic.types import StringConstraints
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path, parse_fine_tuned_lora_name
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models import supports_lora
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.core.sched.output import SchedulerOutput

from api_schemas.errors import excerpt
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.compat import brings, params_of
from nnsight_engine.vllm_backend.traces.block_adapters import NO_SLOT, BlockAdapters
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY

CONFIG_FILE: Final = "adapter_config.json"
_WITHOUT_EFFECT: Final = frozenset({
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
})  # fmt: skip
"""Fields of PEFT's about training, and about which modules have tensors."""

_Pattern = Annotated[str, StringConstraints(min_length=1)]


class _Config(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    peft_type: Literal["LORA"] = "LORA"
    r: PositiveInt
    lora_alpha: FiniteFloat
    rank_pattern: dict[_Pattern, PositiveInt] | None = None
    alpha_pattern: dict[_Pattern, FiniteFloat] | None = None
    use_rslora: bool | None = None
    fan_in_fan_out: Literal[False] | None = None
    modules_to_save: list[str] | None = None


def check_config(folder: str) -> None:
    """Check the configuration.

    Raises:
        OSError: It cannot be read.
        ValueError: A field is wrong, or would have no effect.
    """
    try:
        config = json.loads(Path(folder, CONFIG_FILE).read_bytes())
        fields = _Config.model_validate(config)
    except ValidationError as error:
        first_error = error.errors()[0]
        name = ".".join(map(str, first_error["loc"])) or "the whole"
        raise ValueError(
            f"{CONFIG_FILE}: {name}: {first_error['msg']}, got {excerpt(first_error['input'])}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE} is no JSON: {error}") from error
    checked_by_vllm = {
        field.name for field in dataclasses.fields(PEFTHelper) if not field.name.startswith("vllm_")
    }
    for name, value in (fields.model_extra or {}).items():
        if value and name not in checked_by_vllm | _WITHOUT_EFFECT:
            raise ValueError(
                f"{CONFIG_FILE}: {excerpt(name)} has no effect here; it may only be null or false"
            )


class CheckedLoRAModel(LoRAModel):
    @classmethod
    def from_lora_tensors(
        cls, lora_model_id: int, tensors: dict[str, torch.Tensor], peft_helper: PEFTHelper, **kwargs: Any
    ) -> CheckedLoRAModel:
        """Make the adapter; raise ValueError if a tensor takes another's place, or is of integers."""
        by_module: dict[tuple[str, ...], str] = {}
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise ValueError(
                    f"the tensor {name!r} has the dtype {tensor.dtype}, and no floating-point one"
                )
            module, _ = parse_fine_tuned_lora_name(name, kwargs.get("weights_mapper"))
            side = (module, *name.removesuffix(".weight").rsplit(".", 1)[-1:])
            if by_module.setdefault(side, name) != name:
                raise ValueError(f"the tensors {by_module[side]!r} and {name!r} are of the same module")
        made: CheckedLoRAModel = super().from_lora_tensors(lora_model_id, tensors, peft_helper, **kwargs)
        return made


def check_weights(adapter: LoRAModel, manager: LoRAModelManager) -> None:
    """Check the tensors of an adapter before it is added to the manager.

    Raises:
        ValueError: A module has no place in the model, or lacks a matrix; a matrix has another shape than the
            module needs, or numbers that are not finite.
    """
    if not adapter.loras and not adapter.modules_to_save:
        raise ValueError("it has no tensors")
    places = _places(manager)
    elsewhere = tuple(
        f"{name}." for name, module in manager.model.named_modules() if isinstance(module, PPMissingLayer)
    )
    for name, weights in adapter.loras.items():
        place = places.get(name)
        if place is None and manager.is_pooling_model:  # vLLM looks for both
            place = places.get(f"model.{name}")
        if place is not None:
            _check_layer(name, weights, *place)
        elif not name.startswith(elsewhere):  # another stage of the pipeline checks those that it has
            raise ValueError(f"no projection of the model that takes adapters is called {name!r}")
    for name, whole in adapter.modules_to_save.items():
        _check_finite(f"{name} (modules_to_save)", filter(None.__ne__, (whole.weight, whole.bias)))


def _places(manager: LoRAModelManager) -> dict[str, tuple[int, int | None]]:
    """Return the input and output width of each projection that takes adapters, by its name in adapters.

    An output width of None may be any.
    """
    places: dict[str, tuple[int, int | None]] = {}
    for name, wrapper in manager.modules.items():
        layer: Any = wrapper.base_layer
        widths = _output_widths(layer)
        parts = manager.packed_modules.get(name)
        if parts is None:
            places[name] = (layer.input_size, sum(widths))
            continue
        # Where one part of an adapter covers several of the layer, vLLM splits it, and checks that it can.
        each = widths if len(widths) == len(parts) else [None] * len(parts)
        places |= {part: (layer.input_size, width) for part, width in zip(parts, each, strict=True)}
    return places


def _output_widths(layer: nn.Module | Any) -> list[int]:
    """Return the widths of a layer's parts, such as queries, keys and values, over all ranks."""
    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads
        return [
            layer.total_num_heads * layer.head_size,
            keys * layer.head_size,
            keys * layer.v_head_size,
        ]
    return list(getattr(layer, "output_sizes", (layer.output_size,)))


def _check_layer(name: str, layer: LoRALayerWeights, input_width: int, output_width: int | None) -> None:
    """Raise ValueError if a matrix of a module is missing, has another shape, or is not finite."""
    sides = {"lora_A": layer.lora_a, "lora_B": layer.lora_b}
    needed = {"lora_A": (layer.rank, input_width), "lora_B": (output_width, layer.rank)}
    for side, tensor in sides.items():
        if tensor is None:
            raise ValueError(f"{name!r} has no {side}")
        wanted = needed[side]
        is_right = tensor.ndim == len(wanted) and all(
            width in (None, size) for width, size in zip(wanted, tensor.shape, strict=True)
        )
        if not is_right:
            raise ValueError(
                f"{side} of {name!r} must have the shape {list(wanted)}, got {list(tensor.shape)}"
            )
    _check_finite(name, (layer.lora_a, layer.lora_b, layer.lora_b * layer.scaling))


def _check_finite(name: str, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.isfinite().all():
            raise ValueError(f"{name!r} has numbers that are not finite in {tensor.dtype}")


_VOCABULARY: Final = (LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)
_BEFORE_UNEMBEDDING: Final = "project_out"


class AdaptedRowsMixin(ABC):
    """In front of vLLM's wrapper of adapters: changes rows by the adapter of their request or block."""

    blocks: BlockAdapters
    device: Any
    sampler_indices: torch.Tensor
    token_lora_indices: torch.Tensor
    _spans: Sequence[tuple[int, int, int]] = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Take in a step's adapters; on a CPU also as runs of rows with one slot, ``(start, stop, slot)``."""
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
        spans = self._spans if slot is None else [(0, len(x), slot)]
        for start, stop, index in spans:
            if index == NO_SLOT:
                continue
            first_column = 0
            for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                inner = x[start:stop].float() @ down[index, 0].float().T * scale
                columns = y[start:stop, first_column : first_column + width]
                columns += inner.to(y.dtype) @ up[index, 0].to(y.dtype).T
                first_column += width
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
        ordered = sorted(lora_requests, key=lambda request: request.lora_int_id)
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
