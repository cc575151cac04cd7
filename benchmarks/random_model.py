"""A folder of a Llama model without weights: vLLM makes random ones. Its tokenizer is the bundled model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nnsight_engine.modeling.bundled import bundled_model_path

BILLION: Final[Mapping[str, int]] = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""The sizes of Llama 3.2 1B; with this vocabulary 1.07 billion weights."""

TWO_LAYERS: Final[Mapping[str, int]] = {**BILLION, "num_hidden_layers": 2, "intermediate_size": 512}
"""The same, small enough for a CPU."""

_TOKENIZER: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def write_random_model(folder: Path, sizes: Mapping[str, int]) -> None:
    """Write the configuration of a model of some sizes, and the tokenizer."""
    bundled = bundled_model_path()
    config = json.loads((bundled / "config.json").read_text())
    config |= {
        **sizes,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
    }
    config |= {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in _TOKENIZER:
        if (bundled / name).is_file():
            shutil.copyfile(bundled / name, folder / name)
