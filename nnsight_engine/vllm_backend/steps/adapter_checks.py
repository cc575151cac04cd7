"""Checks of a LoRA adapter; vLLM ignores most of its configuration, unknown tensors, and wrong shapes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError
from pydantic.types import StringConstraints
from torch import nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models.utils import PPMissingLayer

from api_schemas.excerpt import excerpt

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
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{CONFIG_FILE}: {name}: {first['msg']}, got {excerpt(first['input'])}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE} is no JSON: {error}") from error
    checked_by_vllm = {one.name for one in dataclasses.fields(PEFTHelper) if not one.name.startswith("vllm_")}
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
        found: dict[tuple[str, ...], str] = {}
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise ValueError(
                    f"the tensor {name!r} has the dtype {tensor.dtype}, and no floating-point one"
                )
            module, _ = parse_fine_tuned_lora_name(name, kwargs.get("weights_mapper"))
            side = (module, *name.removesuffix(".weight").rsplit(".", 1)[-1:])
            if found.setdefault(side, name) != name:
                raise ValueError(f"the tensors {found[side]!r} and {name!r} are of the same module")
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
    for name, one in adapter.loras.items():
        place = places.get(name)
        if place is None and manager.is_pooling_model:  # vLLM looks for both
            place = places.get(f"model.{name}")
        if place is not None:
            _check_layer(name, one, *place)
        elif not name.startswith(elsewhere):  # another stage of the pipeline checks those that it has
            raise ValueError(f"no projection of the model that takes adapters is called {name!r}")
    for name, whole in adapter.modules_to_save.items():
        _check_finite(f"{name} (modules_to_save)", filter(None.__ne__, (whole.weight, whole.bias)))


def _places(manager: LoRAModelManager) -> dict[str, tuple[int, int | None]]:
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
    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads
        return [
            layer.total_num_heads * layer.head_size,
            keys * layer.head_size,
            keys * layer.v_head_size,
        ]
    return list(getattr(layer, "output_sizes", (layer.output_size,)))


def _check_layer(name: str, layer: LoRALayerWeights, input_width: int, output_width: int | None) -> None:
    sides = {"lora_A": layer.lora_a, "lora_B": layer.lora_b}
    needed = {"lora_A": (layer.rank, input_width), "lora_B": (output_width, layer.rank)}
    for side, tensor in sides.items():
        if tensor is None:
            raise ValueError(f"{name!r} has no {side}")
        wanted = needed[side]
        is_right = tensor.ndim == len(wanted) and all(
            width in (None, found) for width, found in zip(wanted, tensor.shape, strict=True)
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


__all__ = ["CONFIG_FILE", "CheckedLoRAModel", "check_config", "check_weights"]
