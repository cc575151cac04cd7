"""A narrow copy of the bundled model: its tokenizer, its template and its 30 layers, with random weights.

A step of it takes a fifth of the bundled model's time. Its text means nothing, and repeats nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nnsight_engine.modeling.bundled import bundled_model_path

NAME: Final = "narrow"
WIDTH: Final = 128
PROMPT: Final = "The Eiffel Tower is in the city of"
NEXT: Final = "otle"
"""What it adds to that prompt first."""
_INITIALIZER_RANGE: Final = 0.15


def write_narrow_model(folder: Path) -> Path:
    """Write the checkpoint, with weights of always the same seed, in bfloat16 as the bundled one's."""
    bundled = bundled_model_path()
    folder.mkdir(parents=True)
    for path in bundled.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = LlamaConfig(
        **json.loads((bundled / "config.json").read_text())
        | {
            "hidden_size": WIDTH,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": WIDTH // 4,
            "intermediate_size": 2 * WIDTH,
            "initializer_range": _INITIALIZER_RANGE,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    # Embeddings as large as what layers add, or else every position's values would be alike.
    with torch.no_grad():
        model.model.embed_tokens.weight /= _INITIALIZER_RANGE
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
