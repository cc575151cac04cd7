"""Tiny random checkpoints, one per model family, in Hugging Face's format.

No hub is reached: weights come from a seed and the tokenizer from a word list, so a test can
write a whole model in a second. Sizes are the smallest that vLLM's CPU attention takes (heads of
32), and chosen so that mistakes show: heads × head_dim differs from hidden where a family allows
it, fewer KV heads than heads where it has them, a vocabulary that vLLM has to pad.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    FalconH1Config,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    Zamba2Config,
)

if TYPE_CHECKING:
    from pathlib import Path

LOCAL_FAMILIES: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families that vLLM does not run on a CPU in float32: two need torchvision, the third bfloat16."""

VARIANTS: Final = ("opt_post_norm", "gpt_neox_sequential", "falcon_multi_query", "falcon_biased")
"""Members of a family that are wired differently: OPT-350m's norms and projections, GPT-NeoX without the
parallel residual, Falcon 7B's single key head, and Falcon with biases, MLPs after attention, and as many key
heads as query heads."""

UNTABLED: Final = ("flex_olmo", "hunyuan_moe", "lfm2_moe")
"""Decoders without a table, whose residual stream is found by their structure."""

MECHANISMS: Final = (
    "llama",
    "gpt2",
    "gemma2",
    "gemma3n",
    "falcon",
    "qwen3_moe",
    "deepseek_v3",
    "nemotron_h",
)
"""Dense with rotary positions; with learned positions, biases and layer norms; with norms behind the parts;
with several streams; with attention beside the MLP; with experts; with latent attention; recurrent mixers.
"""

NUM_LAYERS: Final = 4
HIDDEN_SIZE: Final = 128
NUM_HEADS: Final = 4
NUM_KV_HEADS: Final = 2
INTERMEDIATE_SIZE: Final = 192
MAX_POSITIONS: Final = 256

END_OF_TEXT: Final = "<|endoftext|>"
WORDS: Final = (
    " the", " a", " is", " of", " in", " to", " and", " I", " think", " dogs", " cats", " are", " city",
    " tower", " Paris", " Rome", " Eiffel", " love", " hate", " good", " bad",
)  # fmt: skip
"""Words that are one token each, leading space included."""

_TOKENS: Final = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_COMMON: Final[dict[str, Any]] = {
    **_TOKENS,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "max_position_embeddings": MAX_POSITIONS,
}
_GROUPED: Final = {**_COMMON, "num_key_value_heads": NUM_KV_HEADS, "intermediate_size": INTERMEDIATE_SIZE}
# Heads of 64, so that heads × head_dim (256) is not the hidden size.
_WIDE: Final = {**_GROUPED, "head_dim": 64}
_GEMMA: Final = {
    **_WIDE,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    "query_pre_attn_scalar": 48,
}
# Heads of full attention have a size, and of keys and values a number, of their own.
_GEMMA4: Final = {**_WIDE, "global_head_dim": 32, "sliding_window": 64, "layer_types": _GEMMA["layer_types"]}
# The last two layers use the keys and values of the first two.
_SHARED_KEYS: Final = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 512,
}
# vLLM scales inputs per layer otherwise before their norm, whose epsilon is out of reach.
_GEMMA3N: Final = {
    **_WIDE,
    **{name: _GEMMA[name] for name in ("sliding_window", "layer_types")},
    "laurel_rank": 16,
    "rms_norm_eps": 1e-9,
}
_GEMMA4_MOE: Final = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
_OPT: Final = {**_COMMON, "ffn_dim": INTERMEDIATE_SIZE, "word_embed_proj_dim": HIDDEN_SIZE}
_MOE: Final = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
_GLM_MOE: Final = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_MLA: Final = {
    **_GROUPED,
    "num_key_value_heads": NUM_HEADS,
    **_GLM_MOE,
    "kv_lora_rank": 512,  # the sizes that vLLM's attention takes
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
# Fields that vLLM reads and that transformers neither has nor needs.
_NOAUX: Final = {**_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_ERNIE_MOE: Final = {
    "moe_intermediate_size": 64,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
}
# Fields that vLLM reads and that transformers does not write.
_MINIMAX: Final = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 32,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}
# vLLM has these biases in any case.
_PHIMOE: Final = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "lm_head_bias": True,
}
_LLAMA4: Final = {
    "intermediate_size_mlp": INTERMEDIATE_SIZE,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 128,
}
_GRANITE: Final = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
_GRANITE_MOE: Final = {**_GROUPED, **_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}
_NEOX: Final = {**_COMMON, "intermediate_size": INTERMEDIATE_SIZE}
_GPT: Final = {**_COMMON, "n_inner": INTERMEDIATE_SIZE}
_MAMBA: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}
# vLLM has no least step of the recurrence, so it is out of reach.
_STEPS: Final = {"chunk_size": 32, "time_step_min": 1e-9}
_LINEAR_ATTENTION: Final = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2),
}

_CONFIGS: Final[dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]] = {
    "llama": (LlamaConfig, {**_GROUPED, "tie_word_embeddings": False}),
    "mistral": (MistralConfig, {**_WIDE, "sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {**_WIDE, "tie_word_embeddings": False}),
    "gemma2": (Gemma2Config, {**_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}),
    "gemma3": (Gemma3TextConfig, _GEMMA),
    "gemma4": (Gemma4TextConfig, {**_GEMMA4, **_SHARED_KEYS, "use_double_wide_mlp": True}),
    "gemma3n": (
        Gemma3nTextConfig,
        {**_GEMMA3N, **_SHARED_KEYS, "activation_sparsity_pattern": [0.5, 0.0] * (NUM_LAYERS // 2)},
    ),
    "gemma4_moe": (Gemma4TextConfig, {**_GEMMA4, **_GEMMA4_MOE}),
    "cohere": (CohereConfig, {**_GROUPED, "logit_scale": 0.5}),
    "cohere2": (
        Cohere2Config,
        {**_WIDE, "sliding_window": 64, "layer_types": _GEMMA["layer_types"], "logit_scale": 0.5},
    ),
    "ernie4_5_moe": (Ernie4_5_MoeConfig, {**_GROUPED, **_ERNIE_MOE}),
    "llama4_text": (Llama4TextConfig, {**_WIDE, **_LLAMA4}),
    "deepseek_v2": (DeepseekV2Config, {**_MLA, "topk_method": "greedy"}),
    "deepseek_v3": (DeepseekV3Config, _NOAUX),
    "glm4_moe_lite": (Glm4MoeLiteConfig, _NOAUX),
    "exaone4": (Exaone4Config, {**_GROUPED, "sliding_window": 64, "layer_types": _GEMMA["layer_types"]}),
    "stablelm": (StableLmConfig, _GROUPED),
    "gemma": (GemmaConfig, _WIDE),
    "glm": (GlmConfig, {**_GROUPED, "head_dim": 32}),
    "glm4": (Glm4Config, {**_GROUPED, "head_dim": 32}),
    "glm4_moe": (Glm4MoeConfig, {**_WIDE, **_GLM_MOE}),
    "minimax_m2": (MiniMaxM2Config, {**_WIDE, **_MINIMAX}),
    "flex_olmo": (FlexOlmoConfig, {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_moe": (HunYuanMoEV1Config, {**_WIDE, "num_experts": 4, "moe_topk": 2}),
    "lfm2_moe": (
        Lfm2MoeConfig,
        {**_GROUPED, **_MOE, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "ministral3": (Ministral3Config, _WIDE),
    "phimoe": (PhimoeConfig, {**_GROUPED, **_PHIMOE}),
    "mixtral": (MixtralConfig, {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (OlmoeConfig, {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (Qwen2MoeConfig, {**_GROUPED, **_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": (Qwen3MoeConfig, {**_WIDE, **_MOE, "norm_topk_prob": True}),
    "gpt_oss": (
        GptOssConfig,
        {**_WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
    "granite": (GraniteConfig, {**_GROUPED, **_GRANITE}),
    "granitemoe": (GraniteMoeConfig, _GRANITE_MOE),
    "granitemoeshared": (GraniteMoeSharedConfig, {**_GRANITE_MOE, "shared_intermediate_size": 64}),
    "ministral": (MinistralConfig, {**_WIDE, "sliding_window": 64}),
    "nemotron": (NemotronConfig, _WIDE),
    "olmo": (OlmoConfig, _GROUPED),
    "olmo2": (Olmo2Config, _GROUPED),
    "olmo3": (Olmo3Config, {**_GROUPED, "sliding_window": 64, "layer_types": _GEMMA["layer_types"]}),
    "phi": (PhiConfig, _GROUPED),
    "ernie4_5": (Ernie4_5Config, _WIDE),
    "hunyuan_dense": (HunYuanDenseV1Config, _WIDE),
    "seed_oss": (SeedOssConfig, _WIDE),
    "smollm3": (SmolLM3Config, _GROUPED),
    "starcoder2": (Starcoder2Config, {**_GROUPED, "sliding_window": None}),
    "phi3": (Phi3Config, {**_GROUPED, "original_max_position_embeddings": MAX_POSITIONS}),
    "gpt2": (GPT2Config, _GPT),
    "gpt_bigcode": (GPTBigCodeConfig, _GPT),
    "gptj": (GPTJConfig, {**_GPT, "rotary_dim": 16}),
    "bloom": (BloomConfig, _COMMON),
    "falcon": (FalconConfig, {**_COMMON, "new_decoder_architecture": True, "num_kv_heads": NUM_KV_HEADS}),
    "falcon_multi_query": (FalconConfig, _COMMON),
    "falcon_biased": (
        FalconConfig,
        {**_COMMON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "apertus": (ApertusConfig, _GROUPED),
    "arcee": (ArceeConfig, _GROUPED),
    "opt": (OPTConfig, _OPT),
    "opt_post_norm": (OPTConfig, {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 64}),
    "gpt_neox": (GPTNeoXConfig, _NEOX),
    "falcon_h1": (FalconH1Config, {**_GROUPED, **_MAMBA, "mamba_d_ssm": 256, "ssm_out_multiplier": 0.5}),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        {
            **_GROUPED,
            **_MAMBA,
            **_GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": INTERMEDIATE_SIZE,
            "layer_types": ["mamba", "attention"] * (NUM_LAYERS // 2),
            "position_embedding_type": "rope",
        },
    ),
    "lfm2": (
        Lfm2Config,
        {
            **_GROUPED,
            "layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2),
            "block_auto_adjust_ff_dim": False,
            # vLLM reads these.
            "conv_dim": HIDDEN_SIZE,
            "conv_dim_out": HIDDEN_SIZE,
            "block_dim": HIDDEN_SIZE,
        },
    ),
    "mamba2": (
        Mamba2Config,
        {**_TOKENS, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": NUM_LAYERS, "num_heads": 8}
        | {"head_dim": 32, "state_size": 32, "n_groups": 1, "expand": 2, "chunk_size": 32},
    ),
    "qwen3_5": (Qwen3_5TextConfig, {**_WIDE, **_LINEAR_ATTENTION}),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        {**_WIDE, **_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        {**_WIDE, **_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 64}
        # Rounded to bfloat16, routers of random weights choose others for some tokens.
        | {"mlp_only_layers": [0, 1, 2]},
    ),
    "nemotron_h": (
        NemotronHConfig,
        {name: value for name, value in _WIDE.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "ssm_state_size": 32}
        | {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, **_STEPS},
    ),
    "zamba2": (
        Zamba2Config,
        {**_COMMON, "intermediate_size": INTERMEDIATE_SIZE, "mamba_d_state": 32, "n_mamba_heads": 8}
        | {"layers_block_type": ["mamba", "hybrid"] * (NUM_LAYERS // 2), "num_mem_blocks": 1, **_STEPS},
    ),
    "gpt_neox_sequential": (GPTNeoXConfig, {**_NEOX, "use_parallel_residual": False}),
}

FAMILIES: Final = tuple(
    family for family in _CONFIGS if family not in {*LOCAL_FAMILIES, *VARIANTS, *UNTABLED}
)
"""The supported families."""

_ARCHITECTURES: Final = {"phimoe": "PhiMoEForCausalLM"}
"""The names that published checkpoints have, where transformers writes others."""
_XIELU: Final = {"alpha_p": 0.388671875, "alpha_n": -1.140625}
"""Apertus's parameters, with which its activation is almost the same in bfloat16, vLLM's for it alone."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer: any text encodes, and ``WORDS`` are single tokens.

    No special token is added to a prompt; ``<|endoftext|>`` ends and pads.
    """
    # Token 0 ends the text: configs and generation defaults then agree without further settings.
    vocab = {END_OF_TEXT: 0}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        # Byte-level BPE writes a space as Ġ. Every merge grows a word from it, so that words
        # cannot spoil each other's merges.
        letters = word.replace(" ", "Ġ")
        for end in range(1, len(letters)):
            merge = (letters[:end], letters[end])
            if merge not in merges:
                merges.append(merge)
                vocab[letters[: end + 1]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_config(family: str, vocab_size: int, **changes: Any) -> PreTrainedConfig:
    """Return the config of a family's (or a variant's) tiny model, with ``changes`` to it.

    Raises:
        ValueError: There is no such family.
    """
    if family not in _CONFIGS:
        raise ValueError(f"family must be one of {', '.join(FAMILIES + VARIANTS + UNTABLED)}, got {family!r}")
    config_class, settings = _CONFIGS[family]
    return config_class(vocab_size=vocab_size, **{**settings, **changes})


def write_checkpoint(family: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a family's tiny random model and its tokenizer, float32.

    Args:
        family: One of ``FAMILIES``, ``VARIANTS`` or ``UNTABLED``.
        directory: Where to write; made if missing.
        seed: Seed of the weights; the same seed writes the same weights.
        **changes: What the config is to have instead.

    Returns:
        ``directory``, ready for ``from_pretrained`` and for vLLM.
    """
    config = build_config(family, vocab_size=len(build_tokenizer()), **changes)
    return write_model(config, directory, seed=seed)


def write_model(config: PreTrainedConfig, directory: Path, *, seed: int = 0) -> Path:
    """Write a random model with this config, and its tokenizer, as ``write_checkpoint`` does."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some start at random numbers, which are not redrawn but moved
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Gemma multiplies embeddings by the root of the hidden size.
    embedding_std = 0.03 if config.model_type.startswith("gemma") else 0.1
    randomize(model, torch.Generator().manual_seed(seed), embedding_std)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    if config.model_type in _ARCHITECTURES:
        written = directory / "config.json"
        fields = json.loads(written.read_text())
        written.write_text(json.dumps({**fields, "architectures": [_ARCHITECTURES[config.model_type]]}))
    build_tokenizer().save_pretrained(directory)
    return directory


def randomize(model: torch.nn.Module, generator: torch.Generator, embedding_std: float) -> None:
    """Redraw every weight with enough spread that tokens, layers and heads differ plainly.

    Norm weights and biases are moved off their initial 1 and 0, so that dropping one shows.
    Embeddings are small beside what the blocks add: where they also unembed, a large one would
    make every token predict itself.
    """
    corrections = [one for one in model.named_buffers() if one[0].endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *corrections):
            noise = torch.randn(parameter.shape, generator=generator)
            if (last := name.rpartition(".")[2]) in _XIELU:
                parameter.fill_(_XIELU[last])
            elif parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif any(part in name for part in ("embed", "wte", "wpe")):
                parameter.copy_(embedding_std * noise)
            else:
                parameter.copy_(0.15 * noise)
