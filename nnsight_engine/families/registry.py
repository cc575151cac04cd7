"""The table for a model: by its class in vLLM, or by its ``model_type`` in transformers."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Final

from nnsight_engine.families import dense, experts, gemma, gpt, hybrids
from nnsight_engine.families.layout import EngineFamily, TransformersFamily

ENGINE_FAMILIES: Final = (*dense.VLLM, *gpt.VLLM, *experts.VLLM, *gemma.VLLM, *hybrids.VLLM)
"""The tables for vLLM."""

TRANSFORMERS_FAMILIES: Final[Mapping[str, TransformersFamily]] = types.MappingProxyType(
    {
        model_type: family
        for family in (
            *dense.TRANSFORMERS,
            *gpt.TRANSFORMERS,
            *experts.TRANSFORMERS,
            *gemma.TRANSFORMERS,
            *hybrids.TRANSFORMERS,
        )
        for model_type in family.model_types
    }
)
"""The tables for transformers, by ``model_type``."""


def engine_family(class_name: str, architectures: Sequence[str]) -> EngineFamily | None:
    """Return the table for a model class of vLLM and its config's ``architectures``; None without one."""
    for family in ENGINE_FAMILIES:
        if class_name in family.model_classes and (
            not family.architectures or any(name in family.architectures for name in architectures)
        ):
            return family
    return None
