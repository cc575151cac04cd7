"""Which options are refused with a model, among them forms of parallelism, and with which reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from transformers import Gemma4TextConfig, LlamaConfig, Mamba2Config, PretrainedConfig, Qwen3MoeConfig
from vllm import EngineArgs
from vllm.config import VllmConfig

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.compat import check_supported
from nnsight_engine.vllm_backend.vllm import VLLM

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
DENSE: Final = LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES)
EXPERTS: Final = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"], head_dim=32, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=64, **SIZES,
)  # fmt: skip


def config_of(folder: Path, config: PretrainedConfig, **options: Any) -> VllmConfig:
    config.save_pretrained(folder)
    options = {"data_parallel_size": 2, **options}
    return EngineArgs(str(folder), skip_tokenizer_init=True, **options).create_engine_config()


def test_engines_of_a_dense_model_on_this_machine_are_supported(tmp_path: Path) -> None:
    check_supported(config_of(tmp_path, DENSE))
    check_supported(config_of(tmp_path, DENSE, data_parallel_size_local=2))


@pytest.mark.parametrize(
    ("config", "options", "name", "reason"),
    [
        (EXPERTS, {}, "--data-parallel-size with a model of experts", "compute each step together"),
        (DENSE, {"data_parallel_size_local": 1}, "--data-parallel-size-local", "one machine"),
        (
            DENSE,
            {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1},
            "--data-parallel-external-lb",
            "one machine",
        ),
        (DENSE, {"data_parallel_backend": "ray"}, "--data-parallel-size with Ray", "one machine"),
    ],
)
def test_other_forms_are_refused_by_name(
    config: PretrainedConfig, options: dict[str, Any], name: str, reason: str, tmp_path: Path
) -> None:
    found = config_of(tmp_path, config, **options)
    with pytest.raises(UnsupportedOptionError, match=f"(?s){name}.*{reason}.*--replicas"):
        check_supported(found)


def test_stages_are_refused_for_a_model_whose_inputs_per_layer_vllm_drops(tmp_path: Path) -> None:
    config = Gemma4TextConfig(architectures=["Gemma4ForCausalLM"], head_dim=32, **SIZES)
    found = config_of(tmp_path, config, data_parallel_size=1, pipeline_parallel_size=2)
    with pytest.raises(UnsupportedOptionError, match="--pipeline-parallel-size with a model that has inputs"):
        check_supported(found)


def test_a_prefill_that_leaves_out_positions_is_refused(tmp_path: Path) -> None:
    config = Gemma4TextConfig(architectures=["Gemma4ForCausalLM"], head_dim=32, **SIZES)
    found = config_of(tmp_path, config, data_parallel_size=1, kv_sharing_fast_prefill=True)
    with pytest.raises(UnsupportedOptionError, match="--kv-sharing-fast-prefill"):
        check_supported(found)


def test_a_prefix_cache_of_mamba2_is_refused_on_a_cpu(tmp_path: Path) -> None:
    config = Mamba2Config(
        architectures=["Mamba2ForCausalLM"], hidden_size=64, num_heads=4, head_dim=32, state_size=32,
        n_groups=1, num_hidden_layers=1, vocab_size=64,
    )  # fmt: skip
    check_supported(config_of(tmp_path, config, data_parallel_size=1))
    found = config_of(tmp_path, config, data_parallel_size=1, enable_prefix_caching=True)
    with pytest.raises(UnsupportedOptionError, match="--enable-prefix-caching with a model of Mamba-2"):
        check_supported(found)


def test_the_blocking_engine_names_the_mode_that_has_several(tmp_path: Path) -> None:
    DENSE.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedOptionError, match='data_parallel_size above 1 needs mode="async"'):
        VLLM(str(tmp_path), data_parallel_size=2, skip_tokenizer_init=True, dispatch=True)
