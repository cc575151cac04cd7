"""Our defaults among vLLM's arguments."""

from __future__ import annotations

import pytest
import torch

from app.engine.vllm_arguments import parse


@pytest.mark.parametrize(
    ("capability", "options", "dtype"),
    [
        ("AVX2", [], "float32"),
        ("AVX2", ["--dtype", "bfloat16"], "bfloat16"),
        ("AVX512", [], "auto"),
        ("DEFAULT", [], "auto"),
    ],
)
def test_models_run_in_float32_where_bfloat16_is_slow(
    capability: str, options: list[str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert parse(["some/model", *options]).dtype == dtype
