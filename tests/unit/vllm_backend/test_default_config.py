"""An engine with interventions is configured as plain vLLM is, apart from what is listed here."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import LlamaConfig
from vllm import EngineArgs

from nnsight_engine.vllm_backend.compat import (
    CONFIG_KEY,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    EngineLimits,
    engine_config,
    engine_options,
)

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
        {"pipeline_parallel_size": 2},
        {"async_scheduling": False},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False},
        {"enable_lora": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ],
)
def test_only_the_classes_differ(options: dict[str, Any], tmp_path: Path) -> None:
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    options = {"model": str(tmp_path), "skip_tokenizer_init": True, **options}
    plain = EngineArgs(**options).create_engine_config()
    ours = engine_config(EngineArgs(**options, **engine_options(EngineLimits())))
    before, after = dict(_values(plain)), dict(_values(ours))
    assert {
        "scheduler_config.async_scheduling",
        "compilation_config.mode",
        "compilation_config.cudagraph_mode",
        "cache_config.block_size",
    } <= set(before)
    differing = {path: after[path] for path in after if path not in before or before[path] != after[path]}
    assert differing == {**OURS, **(OF_DRAFTS if ours.speculative_config else {})}
    assert set(before) <= set(after)
    assert ours.use_v2_model_runner == plain.use_v2_model_runner
