"""Which models a server's status says it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, Gemma4TextConfig, LlamaConfig

from nnsight_engine import LanguageModel, bundled_model_path
from nnsight_engine.modeling.bundled import BUNDLED_MODEL_NAME
from nnsight_engine.remote_backend.client.status import ModelStatus
from nnsight_engine.remote_backend.messages import fingerprint_of


@pytest.fixture
def served() -> ModelStatus:
    config = AutoConfig.from_pretrained(bundled_model_path())
    names = [BUNDLED_MODEL_NAME, "org/smol"]
    return ModelStatus(BUNDLED_MODEL_NAME, names, True, ["vllm"], fingerprint_of(config))


def test_a_model_is_known_by_its_names_and_by_a_folder_with_the_same(
    served: ModelStatus, tmp_path: Path
) -> None:
    model = LanguageModel(str(bundled_model_path()), dispatch=False)
    for name in (
        BUNDLED_MODEL_NAME,
        "org/smol",
        "org/smol/",
        str(bundled_model_path()),
        model.to_model_key(),
    ):
        assert served.is_called(name)
    for name in ("gpt2", "smol", str(tmp_path), str(tmp_path / "none"), ""):
        assert not served.is_called(name)


def test_a_model_made_from_a_module_has_no_key() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 16, "num_hidden_layers": 1}
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    wrapped = LanguageModel(LlamaConfig(**sizes, num_attention_heads=1), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="load it by name"):
        wrapped.to_model_key()


def test_models_whose_layers_differ_are_told_apart() -> None:
    def fingerprint(num_heads: int) -> str:
        return fingerprint_of(
            Gemma4TextConfig(attention_k_eq_v=True, num_global_key_value_heads=num_heads, num_hidden_layers=6)
        )

    assert fingerprint(1) == fingerprint(1)
    assert fingerprint(1) != fingerprint(2)
