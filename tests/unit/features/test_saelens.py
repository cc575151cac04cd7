"""Configs of SAELens, old and new, mean what SAELens means by them; others are refused by name."""

from __future__ import annotations

from typing import Any, Final

import pytest

from api_schemas.errors import ApiError
from nnsight_engine.features.config import Architecture, Normalization
from nnsight_engine.features.saelens import point_of, read_config

NEW: Final[dict[str, Any]] = {
    "d_in": 8, "d_sae": 16, "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": False,
    "normalize_activations": "none", "reshape_activations": "none", "architecture": "jumprelu",
    "metadata": {
        "sae_lens_version": "6.21.0", "hook_name": "blocks.7.hook_attn_out", "hook_head_index": None,
        "model_name": "meta-llama/Llama-3.2-1B-Instruct", "prepend_bos": True, "seqpos_slice": [None],
        "model_from_pretrained_kwargs": {"center_writing_weights": False},
    },
}  # fmt: skip
OLD: Final[dict[str, Any]] = {
    "architecture": "standard", "d_in": 8, "d_sae": 16, "dtype": "float32", "device": "cuda",
    "model_name": "gpt2-small", "hook_name": "blocks.8.hook_resid_pre", "hook_layer": 8,
    "hook_head_index": None, "activation_fn_str": "relu", "activation_fn_kwargs": {},
    "apply_b_dec_to_input": True,
    "finetuning_scaling_factor": False, "sae_lens_training_version": "3.20.3", "normalize_activations": None,
    "model_from_pretrained_kwargs": {}, "l1_coefficient": 5, "normalize_sae_decoder": False,
}  # fmt: skip


def test_version_6() -> None:
    found = read_config(NEW)
    assert found.config.architecture is Architecture.JUMPRELU
    assert (found.config.input_width, found.config.num_features, found.config.output_width) == (8, 16, 8)
    assert not found.config.subtracts_decoder_bias
    assert found.hook == "blocks.7.hook_attn_out"
    assert found.model == "meta-llama/Llama-3.2-1B-Instruct"


def test_flat_configs() -> None:
    found = read_config(OLD)
    assert found.config.architecture is Architecture.STANDARD
    assert found.config.subtracts_decoder_bias
    assert found.config.normalization is Normalization.NONE
    assert found.hook == "blocks.8.hook_resid_pre"
    older = {
        key: one for key, one in OLD.items() if key not in {"architecture", "hook_name", "activation_fn_str"}
    }
    oldest = read_config({**older, "hook_point": "blocks.2.hook_mlp_out", "normalize_activations": False})
    assert oldest.config == found.config
    assert oldest.hook == "blocks.2.hook_mlp_out"


@pytest.mark.parametrize(
    "fields",
    [
        {"architecture": "topk", "k": 4},
        {"architecture": "topk", "activation_fn_kwargs": {"k": 4}},
        {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 4}},
    ],
)
def test_k_of_each_version(fields: dict[str, Any]) -> None:
    config = read_config({**OLD, **fields}).config
    assert (config.architecture, config.k, config.rescales_by_decoder_norm) == (Architecture.TOPK, 4, False)
    rescaled = read_config({**NEW, "architecture": "topk", "k": 4, "rescale_acts_by_decoder_norm": True})
    assert rescaled.config.rescales_by_decoder_norm


def test_transcoders_have_a_second_place() -> None:
    metadata = {"hook_name": "blocks.3.mlp.hook_in", "hook_name_out": "blocks.3.hook_mlp_out"}
    found = read_config({**NEW, "architecture": "skip_transcoder", "d_out": 5, "metadata": metadata})
    assert (found.config.output_width, found.output_hook) == (5, "blocks.3.hook_mlp_out")
    assert found.config.tensor_shapes["W_skip"] == (5, 8)
    flat = {key: one for key, one in NEW.items() if key not in {"metadata", "apply_b_dec_to_input"}}
    old = read_config({**flat, **metadata, "architecture": "transcoder", "d_out": 5})
    assert (old.output_hook, old.config.subtracts_decoder_bias) == ("blocks.3.hook_mlp_out", False)


def test_the_factor_of_inputs_has_to_be_there() -> None:
    wanted = {**NEW, "normalize_activations": "expected_average_only_in", "norm_scaling_factor": 0.25}
    config = read_config(wanted).config
    assert (config.normalization, config.input_factor) == (Normalization.EXPECTED_AVERAGE, 0.25)
    for factor in (None, 0, -1.0, "2", True, float("nan"), float("inf"), 10**400):
        with pytest.raises(ApiError, match="norm_scaling_factor"):
            read_config({**wanted, "norm_scaling_factor": factor})


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"architecture": "batchtopk"}, "unsupported_dictionary", "saves one for use as `jumprelu`"),
        ({"architecture": "temporal"}, "unsupported_dictionary", "'temporal' is not supported"),
        ({"architecture": 3}, "invalid_dictionary", "`architecture` must be text"),
        ({"architecture": ["topk"]}, "invalid_dictionary", "`architecture` must be text"),
        ({"activation_fn": "tanh-relu"}, "unsupported_dictionary", "tanh-relu"),
        ({"activation_fn": "topk"}, "unsupported_dictionary", "'topk' is not supported"),
        ({"architecture": "topk"}, "invalid_dictionary", "`k` of topk"),
        ({"architecture": "topk", "k": 17}, "invalid_dictionary", "from 1 to `d_sae` (16)"),
        ({"architecture": "topk", "k": 2.0}, "invalid_dictionary", "`k` of topk"),
        ({"d_in": None}, "invalid_dictionary", "`d_in` must be an integer"),
        ({"d_in": True}, "invalid_dictionary", "`d_in` must be an integer"),
        ({"d_sae": 0}, "invalid_dictionary", "`d_sae` must be an integer from 1 to 2097152"),
        ({"d_sae": 2**21 + 1}, "invalid_dictionary", "`d_sae` must be an integer"),
        ({"d_sae": 10**400}, "invalid_dictionary", "`d_sae` must be an integer"),
        ({"architecture": "transcoder"}, "invalid_dictionary", "`d_out`"),
        (
            {"architecture": "transcoder", "d_out": 8, "apply_b_dec_to_input": True},
            "unsupported_dictionary",
            "apply_b_dec_to_input",
        ),
        (
            {"architecture": "transcoder", "d_out": 8, "normalize_activations": "expected_average_only_in"},
            "unsupported_dictionary",
            "not defined for transcoders",
        ),
        ({"apply_b_dec_to_input": "no"}, "invalid_dictionary", "true or false"),
        ({"normalize_activations": "batch_norm"}, "unsupported_dictionary", "'batch_norm' is not supported"),
        ({"normalize_activations": {}}, "unsupported_dictionary", "expected_average_only_in"),
        ({"reshape_activations": "other"}, "unsupported_dictionary", "reshape_activations"),
        ({"metadata": {"hook_head_index": 2}}, "unsupported_dictionary", "single head"),
        ({"metadata": []}, "invalid_dictionary", "`metadata` must be an object"),
        ({"metadata": {"hook_name": 7}}, "invalid_dictionary", "`hook_name` must be text"),
        ({"finetuning_scaling_factor": True}, "unsupported_dictionary", "finetuning_scaling_factor"),
        (
            {"model_from_pretrained_kwargs": {"center_writing_weights": True}},
            "unsupported_dictionary",
            "centred values",
        ),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_config({**NEW, **fields})
    assert caught.value.code == code
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("hook", "point"),
    [
        ("blocks.8.hook_resid_post", "layers.8.output"),
        ("blocks.8.hook_resid_pre", "layers.8.input"),
        ("blocks.0.hook_mlp_out", "layers.0.mlp.output"),
        ("blocks.12.hook_attn_out", "layers.12.attn.output"),
        ("blocks.12.attn.hook_z", "layers.12.attn.heads"),
        ("blocks.8.mlp.hook_in", "layers.8.mlp.input"),
        ("blocks.8.mlp.hook_post", "layers.8.mlp.act"),
        ("model.layers.28", "layers.28.output"),
        ("model.layers.28.mlp", "layers.28.mlp.output"),
        ("model.layers.28.self_attn", "layers.28.attn.output"),
        ("transformer.h.3", "layers.3.output"),
        ("gpt_neox.layers.3.attention", "layers.3.attn.output"),
        ("blocks.8.ln2.hook_normalized", None),
        ("blocks.08.hook_resid_post", None),
        ("blocks.8.hook_mlp_in", None),
        ("hook_embed", None),
        ("", None),
        ("blocks.8.hook_resid_post\n", None),
    ],
)
def test_places_by_name(hook: str, point: str | None) -> None:
    assert point_of(hook, "LlamaForCausalLM") == point


def test_places_that_are_others_in_some_families() -> None:
    for architecture in ("Gemma2ForCausalLM", "Gemma3ForConditionalGeneration", "Olmo2ForCausalLM"):
        assert point_of("blocks.8.hook_mlp_out", architecture) is None
        assert point_of("blocks.8.hook_attn_out", architecture) is None
        assert point_of("blocks.8.hook_resid_post", architecture) == "layers.8.output"
        assert point_of("model.layers.8.mlp", architecture) == "layers.8.mlp.output"
    assert point_of("transformer.h.8.mlp", "BloomForCausalLM") is None
    assert point_of("transformer.h.8", "BloomForCausalLM") == "layers.8.output"
