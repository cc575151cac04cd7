"""Options of an engine: what interventions change of the configuration, and what is refused."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from transformers import Gemma4TextConfig, LlamaConfig, Mamba2Config, PretrainedConfig, Qwen3MoeConfig
from vllm import EngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend import engine_start
from nnsight_engine.vllm_backend.compat import (
    CONFIG_KEY,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    EngineLimits,
    engine_config,
    engine_options,
)
from nnsight_engine.vllm_backend.cpu_plugin import RUNNER, plugin, use_runner_v2
from nnsight_engine.vllm_backend.unsupported_options import REFUSALS, check_supported
from nnsight_engine.vllm_backend.vllm import VLLM

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
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
TWO_STAGES: Final = {"pipeline_parallel_size": 2}
CONNECTOR: Final = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
CLASSIFIER: Final = {
    "runner": "pooling", "convert": "classify", "pooler_config": {"task": "token_classify"},
}  # fmt: skip
V1_OF_RAY: Final = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration that is refused.

    Attributes:
        options: Engine arguments.
        model: The model, which alone is supported.
        changes: Values of the configuration that vLLM does not set on a CPU, and their paths.
        variables: Environment variables.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: PretrainedConfig = dataclasses.field(default_factory=lambda: DENSE)
    changes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def drafting(change: str, value: object) -> Case:
    return Case({"speculative_config": NGRAM}, changes={f"speculative_config.{change}": value})


def parallel(change: str, value: object) -> Case:
    return Case(changes={f"parallel_config.{change}": value})


def engines(**options: Any) -> Case:
    return Case({"data_parallel_size": 2, **options})


CASES: Final[tuple[tuple[str, tuple[Case, ...]], ...]] = (
    (
        "--tensor-parallel-size with --pipeline-parallel-size",
        (Case({"tensor_parallel_size": 2, **TWO_STAGES}),),
    ),
    (
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 with --pipeline-parallel-size",
        (Case({"distributed_executor_backend": "ray", **TWO_STAGES}, variables={V1_OF_RAY: "0"}),),
    ),
    (
        "--speculative-config with --pipeline-parallel-size",
        (Case({"speculative_config": NGRAM, **TWO_STAGES}),),
    ),
    (
        "--pipeline-parallel-size with a model that has inputs per layer (Gemma 4)",
        (Case(TWO_STAGES, INPUTS_PER_LAYER),),
    ),
    ("--speculative-config with extract_hidden_states", (drafting("method", "extract_hidden_states"),)),
    (
        "--speculative-config with enable_adaptive_verification",
        (drafting("enable_adaptive_verification", value=True),),
    ),
    (
        "--speculative-config with dflash or dspark on a CPU",
        (drafting("method", "dflash"), drafting("method", "dspark")),
    ),
    (
        "--speculative-config with several mtp modules on a CPU",
        (drafting("use_multi_module_mtp", lambda: True),),
    ),
    (
        "--speculative-config with rejection_sample_method block on a CPU",
        (Case({"speculative_config": NGRAM | {"rejection_sample_method": "block"}}),),
    ),
    ("--kv-sharing-fast-prefill", (Case({"kv_sharing_fast_prefill": True}, INPUTS_PER_LAYER),)),
    ("--prefill-context-parallel-size above 1", (parallel("prefill_context_parallel_size", 2),)),
    ("--decode-context-parallel-size above 1 on a CPU", (parallel("decode_context_parallel_size", 2),)),
    ("--watermark-config on a CPU", (Case({"watermark_config": {"key": 1}}),)),
    ("--use-fp64-gumbel on a CPU", (Case({"use_fp64_gumbel": True}),)),
    ("--enable-batch-sharded-sampling", (parallel("enable_batch_sharded_sampling", value=True),)),
    (
        "--enable-prefix-caching with a model of Mamba-2 on a CPU",
        (Case({"enable_prefix_caching": True}, MAMBA2),),
    ),
    ("--kv-transfer-config", (Case({"kv_transfer_config": CONNECTOR}),)),
    (
        "--enable-dbo, or --ubatch-size above 1",
        (parallel("enable_dbo", value=True), parallel("ubatch_size", 2)),
    ),
    (
        "--diffusion-config, or a model that generates by diffusion",
        (Case({"diffusion_config": {"canvas_length": 8}}),),
    ),
    ("--enable-lora with a model of experts", (Case({"enable_lora": True}, EXPERTS),)),
    ("--enable-lora with --pooler-config.task token_classify", (Case({"enable_lora": True, **CLASSIFIER}),)),
    ("--data-parallel-size with a model of experts", (Case({"data_parallel_size": 2}, EXPERTS),)),
    (
        "--data-parallel-external-lb, or --data-parallel-hybrid-lb",
        (
            parallel("data_parallel_external_lb", value=True),
            engines(data_parallel_hybrid_lb=True, data_parallel_size_local=1),
        ),
    ),
    ("--data-parallel-size-local below --data-parallel-size", (engines(data_parallel_size_local=1),)),
    ("--data-parallel-size with Ray", (engines(data_parallel_backend="ray"),)),
)


def config_of(folder: Path, model: PretrainedConfig, **options: Any) -> VllmConfig:
    use_runner_v2()
    model.save_pretrained(folder)
    return EngineArgs(str(folder), skip_tokenizer_init=True, **options).create_engine_config()


@pytest.mark.parametrize(("option", "cases"), [pytest.param(*one, id=one[0]) for one in CASES])
def test_an_option_is_refused_with_the_reason(
    option: str, cases: tuple[Case, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in cases:
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
        if option.endswith(" on a CPU"):
            with monkeypatch.context() as patch:
                patch.setattr(type(current_platform), "is_cpu", lambda _: False)
                check_supported(config)


def test_each_refusal_has_a_case_and_is_documented() -> None:
    refused = [one.option for one in REFUSALS]
    assert set(refused) == {option for option, _ in CASES}
    text = Path("docs/correctness.md").read_text(encoding="utf-8")
    table = text.partition("## What is refused\n")[2].partition("\n\n|")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert [cell.replace("`", "") for cell in first_cells] == refused


OURS: Final = {
    "parallel_config.worker_cls": WORKER_CLASS,
    "scheduler_config.scheduler_cls": SCHEDULER_CLASS,
    f"additional_config.{CONFIG_KEY}": {"limits": dataclasses.asdict(EngineLimits())},
}
"""What differs; splitting operations are added when the worker loads the model, see ``steps.graphs``."""

OF_DRAFTS: Final = {
    f"speculative_config.{part}_parallel_config.worker_cls": WORKER_CLASS for part in ("draft", "target")
}
"""What differs as well with speculation: copies of the engine's own."""

_PLAIN: Final = str | int | float | list | tuple | dict | set | enum.Enum | None


def _values(config: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the plain values of a configuration and of its parts, with their paths."""
    found = config if isinstance(config, dict) else vars(config)
    for name, value in found.items():
        if dataclasses.is_dataclass(value) or name == "additional_config":
            yield from _values(value, f"{path}{name}.")
        elif not name.startswith("_") and isinstance(value, _PLAIN) and name != "instance_id":
            yield f"{path}{name}", value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 64},
        {"tensor_parallel_size": 2},
        TWO_STAGES,
        {"distributed_executor_backend": "ray", **TWO_STAGES},
        {"async_scheduling": False},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False},
        {"enable_lora": True},
        {"speculative_config": NGRAM},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "data_parallel_size_local": 2},
    ],
)
def test_supported_options_have_vllms_configuration_but_for_the_classes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    plain = config_of(tmp_path, DENSE, **options)
    check_supported(plain)
    arguments = EngineArgs(
        str(tmp_path), skip_tokenizer_init=True, **options, **engine_options(EngineLimits())
    )
    ours = engine_config(arguments)
    before, after = dict(_values(plain)), dict(_values(ours))
    assert {
        "scheduler_config.async_scheduling",
        "compilation_config.mode",
        "compilation_config.cudagraph_mode",
        "cache_config.block_size",
    } <= set(before)
    differing = {path: after[path] for path in after if path not in before or before[path] != after[path]}
    differing.pop("parallel_config.data_parallel_master_port", None)  # a free one
    assert differing == {**OURS, **(OF_DRAFTS if ours.speculative_config else {})}
    assert set(before) <= set(after)
    assert ours.use_v2_model_runner


def test_a_method_that_only_the_older_runner_has_is_refused_by_name(tmp_path: Path) -> None:
    own = {"method": "custom_class", "model": "a.B", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="speculative method 'custom_class'"):
        config_of(tmp_path, DENSE, speculative_config=own)


def test_the_platform_is_for_runner_v2_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = entry_points(group="vllm.platform_plugins", name="nnsight_engine_cpu")
    assert {one.value for one in found} == {"nnsight_engine.vllm_backend.cpu_plugin:plugin"}, "install anew"
    monkeypatch.delenv(RUNNER, raising=False)
    assert plugin() is None
    use_runner_v2()
    assert plugin() == "nnsight_engine.vllm_backend.cpu_kernels.install.V2CpuPlatform"
    monkeypatch.setenv(RUNNER, "0")
    assert plugin() is None
    with pytest.raises(UnsupportedOptionError, match=f"{RUNNER}=0 is not supported.*unset"):
        use_runner_v2()


@pytest.mark.parametrize(
    ("options", "is_eager"),
    [
        ({}, True),
        ({"enforce_eager": False}, False),
        ({"enforce_eager": True}, True),
        ({"compilation_config": {"backend": "eager"}}, False),
        ({"optimization_level": 1}, False),
    ],
)
@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_model_is_compiled_on_a_cpu_only_if_that_was_asked_for(
    options: dict[str, Any], is_eager: bool, is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DENSE.save_pretrained(tmp_path)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(engine_start, "_HOSTS", {"sync": started.append})
    monkeypatch.setattr(engine_start, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    given = {"model": str(tmp_path), "skip_tokenizer_init": True, **options}
    engine_start.start(given, None, "sync", has_envoys=False)
    config = EngineArgs(**started[0]).create_engine_config()
    assert config.model_config.enforce_eager == (is_eager if is_cpu else options.get("enforce_eager", False))


def test_the_blocking_engine_names_the_mode_that_has_several(tmp_path: Path) -> None:
    DENSE.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedOptionError, match='data_parallel_size above 1 needs mode="async"'):
        VLLM(str(tmp_path), data_parallel_size=2, skip_tokenizer_init=True, dispatch=True)


@pytest.mark.parametrize("value", ["thread", "", "proces", "PROCESS"])
def test_a_sandbox_is_a_process_or_off(value: str) -> None:
    assert EngineLimits().sandbox == "process"
    assert EngineLimits(sandbox="off").sandbox == "off"
    with pytest.raises(UnsupportedOptionError, match=r"'process'.*'off'"):
        EngineLimits(sandbox=value)
