"""Which options are refused, and with which reason."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import Gemma4TextConfig, LlamaConfig, Mamba2Config, PretrainedConfig, Qwen3MoeConfig
from vllm import EngineArgs
from vllm.config import KVTransferConfig, VllmConfig

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.unsupported_options import REFUSALS, check_supported
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
INPUTS_PER_LAYER: Final = Gemma4TextConfig(architectures=["Gemma4ForCausalLM"], head_dim=32, **SIZES)
MAMBA2: Final = Mamba2Config(
    architectures=["Mamba2ForCausalLM"], hidden_size=64, num_heads=4, head_dim=32, state_size=32,
    n_groups=1, num_hidden_layers=1, vocab_size=64,
)  # fmt: skip
NGRAM: Final = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration that is refused.

    Attributes:
        model: The model, which alone is supported.
        options: Engine arguments.
        changes: Values of the configuration that vLLM does not set on a CPU, and their paths.
        variables: Environment variables.
    """

    model: PretrainedConfig = dataclasses.field(default_factory=lambda: DENSE)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


CASES: Final = (
    (
        "--tensor-parallel-size with --pipeline-parallel-size",
        Case(options={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ),
    (
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 with --pipeline-parallel-size",
        Case(
            options={"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
            variables={"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"},
        ),
    ),
    (
        "--speculative-config with --pipeline-parallel-size",
        Case(options={"pipeline_parallel_size": 2, "speculative_config": NGRAM}),
    ),
    (
        "--pipeline-parallel-size with a model that has inputs per layer (Gemma 4)",
        Case(model=INPUTS_PER_LAYER, options={"pipeline_parallel_size": 2}),
    ),
    (
        "--speculative-config with ngram_gpu on the V1 runner",
        Case(options={"speculative_config": {**NGRAM, "method": "ngram_gpu"}}),
    ),
    (
        "--speculative-config with extract_hidden_states",
        Case(
            options={"speculative_config": NGRAM},
            changes={"speculative_config.method": "extract_hidden_states"},
        ),
    ),
    (
        "--speculative-config with enable_adaptive_verification",
        Case(
            options={"speculative_config": NGRAM},
            changes={"speculative_config.enable_adaptive_verification": True},
        ),
    ),
    ("--kv-sharing-fast-prefill", Case(model=INPUTS_PER_LAYER, options={"kv_sharing_fast_prefill": True})),
    (
        "--prefill-context-parallel-size above 1",
        Case(changes={"parallel_config.prefill_context_parallel_size": 2}),
    ),
    (
        "--enable-batch-sharded-sampling",
        Case(changes={"parallel_config.enable_batch_sharded_sampling": True}),
    ),
    (
        "--enable-prefix-caching with a model of Mamba-2 on a CPU",
        Case(model=MAMBA2, options={"enable_prefix_caching": True}),
    ),
    (
        "--kv-transfer-config",
        Case(
            options={
                "kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
            }
        ),
    ),
    ("--enable-dbo, or --ubatch-size above 1", Case(changes={"parallel_config.enable_dbo": True})),
    ("--enable-dbo, or --ubatch-size above 1", Case(changes={"parallel_config.ubatch_size": 2})),
    (
        "--diffusion-config, or a model that generates by diffusion",
        Case(options={"diffusion_config": {"canvas_length": 8}}),
    ),
    ("--enable-lora with a model of experts", Case(model=EXPERTS, options={"enable_lora": True})),
    (
        "--enable-lora with --pooler-config.task token_classify",
        Case(
            options={
                "enable_lora": True,
                "runner": "pooling",
                "convert": "classify",
                "pooler_config": {"task": "token_classify"},
            },
        ),
    ),
    ("--data-parallel-size with a model of experts", Case(model=EXPERTS, options={"data_parallel_size": 2})),
    (
        "--data-parallel-external-lb, or --data-parallel-hybrid-lb",
        Case(changes={"parallel_config.data_parallel_external_lb": True}),
    ),
    (
        "--data-parallel-external-lb, or --data-parallel-hybrid-lb",
        Case(
            options={"data_parallel_size": 2, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 1}
        ),
    ),
    (
        "--data-parallel-size-local below --data-parallel-size",
        Case(options={"data_parallel_size": 2, "data_parallel_size_local": 1}),
    ),
    (
        "--data-parallel-size with Ray",
        Case(options={"data_parallel_size": 2, "data_parallel_backend": "ray"}),
    ),
)


def config_of(folder: Path, model: PretrainedConfig, **options: Any) -> VllmConfig:
    model.save_pretrained(folder)
    return EngineArgs(str(folder), skip_tokenizer_init=True, **options).create_engine_config()


@pytest.mark.parametrize(("option", "case"), [pytest.param(*one, id=one[0]) for one in CASES])
def test_an_option_is_refused_with_the_reason(
    option: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_supported(config_of(tmp_path, case.model))
    for name, text in case.variables.items():
        monkeypatch.setenv(name, text)
    config = config_of(tmp_path, case.model, **case.options)
    if case.changes:
        check_supported(config)
    for path, value in case.changes.items():
        place, _, name = path.rpartition(".")
        monkeypatch.setattr(attrgetter(place)(config), name, value)
    with pytest.raises(UnsupportedOptionError) as refused:
        check_supported(config)
    assert re.fullmatch(
        rf"{re.escape(option)} is not supported together with interventions: .{{10,}}; start .*",
        str(refused.value),
    )


def test_each_refusal_has_a_case() -> None:
    assert {one.option for one in REFUSALS} == {option for option, _ in CASES}


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "data_parallel_size_local": 2},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
        {"speculative_config": NGRAM},
        {"enable_lora": True},
    ],
)
def test_what_is_near_a_refused_option_is_supported(options: dict[str, Any], tmp_path: Path) -> None:
    check_supported(config_of(tmp_path, DENSE, **options))


def test_the_documentation_has_the_same_table() -> None:
    text = Path("docs/correctness.md").read_text(encoding="utf-8")
    table = text.partition("## What is refused\n")[2].partition("\n\n|")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert [cell.replace("`", "") for cell in first_cells] == [one.option for one in REFUSALS]


def test_the_blocking_engine_names_the_mode_that_has_several(tmp_path: Path) -> None:
    DENSE.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedOptionError, match='data_parallel_size above 1 needs mode="async"'):
        VLLM(str(tmp_path), data_parallel_size=2, skip_tokenizer_init=True, dispatch=True)
