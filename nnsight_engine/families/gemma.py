"""Tables of Gemma 3n and Gemma 4, of which some layers use the keys and values of earlier ones."""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.core.model_spec import (
    EXPERT_WEIGHTS,
    EXPERTS,
    KEYS,
    QUERIES,
    ROUTED,
    ROUTER,
    VALUES,
    ordered,
)
from nnsight_engine.families.dense import (
    LLAMA,
    LLAMA_LEAVES,
    TRANSFORMERS_LLAMA,
    TRANSFORMERS_LLAMA_LEAVES,
)
from nnsight_engine.families.layout import Place, Places

_EXPERTS_LAST: Final = ordered(*((leaf, "output") for leaf in (ROUTER, EXPERTS, EXPERT_WEIGHTS, ROUTED)))
"""Experts come beside an MLP, after it."""

# Layers that use another's keys and values have a projection of queries only.
_QUERIES: Final = (LLAMA_LEAVES[QUERIES], Place("self_attn.q_proj", "output"))
_LEAVES: Final[Places] = {**LLAMA_LEAVES, QUERIES: _QUERIES}

VLLM: Final = (
    dataclasses.replace(
        LLAMA,
        name="gemma4",
        model_classes=("Gemma4ForCausalLM",),
        leaves={
            **_LEAVES,
            ROUTER: Place("router.proj", "output"),
            EXPERTS: Place("experts.inner.ids", "output"),
            EXPERT_WEIGHTS: Place("experts.inner.weights", "output"),
            ROUTED: Place("experts.inner.routed", "output"),
        },
        order=_EXPERTS_LAST,
        returns_residual=False,
        returns_none=True,
    ),
    dataclasses.replace(
        LLAMA,
        name="gemma3n",
        model_classes=("Gemma3nForCausalLM",),
        leaves=_LEAVES,
        has_stream=False,  # there are several, and attention and the MLP read and write mixtures of them
        returns_residual=False,
    ),
)
"""The layouts in vLLM."""

TRANSFORMERS: Final = (
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("gemma4_text", "gemma4"),
        embed="",  # the inputs per layer are computed from its output, too
        leaves={
            **TRANSFORMERS_LLAMA_LEAVES,
            # Without a projection of values, that of keys gives both, and only the norms tell them apart.
            KEYS: (
                Place("self_attn.k_norm", "input", lacks="self_attn.v_proj"),
                TRANSFORMERS_LLAMA_LEAVES[KEYS],
            ),
            VALUES: (
                Place("self_attn.v_norm", "input", lacks="self_attn.v_proj"),
                TRANSFORMERS_LLAMA_LEAVES[VALUES],
            ),
            ROUTER: Place("router.proj", "output"),
            EXPERTS: Place("router", "output", "ids"),
            EXPERT_WEIGHTS: Place("router", "output", "weights"),
            ROUTED: Place("experts", "output"),
        },
        order=_EXPERTS_LAST,
        flattened=frozenset({ROUTER, EXPERTS, EXPERT_WEIGHTS, ROUTED}),
        routes_probabilities=True,
    ),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("gemma3n_text", "gemma3n"),
        embed="",  # likewise
        has_stream=False,
    ),
)
"""The layouts in transformers."""
