"""Random LoRA adapters of a checkpoint, in PEFT's format, and the checkpoint into which one is merged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

RANK: Final = 8
ALPHA: Final = 16
_UNADAPTED: Final = ("lm_head", "embed_out", "project_in", "project_out")
_PREFIX: Final = "base_model.model."


def write_adapter(checkpoint: Path, directory: Path, *, seed: int = 0, std: float = 0.1) -> Path:
    """Write an adapter of all linear layers of a checkpoint but the unembedding; return its folder.

    Args:
        checkpoint: The model's folder.
        directory: Where to write; made if missing.
        seed: Seed of the weights.
        std: Standard deviation of the weights of both matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, linear in _linears(_load(checkpoint)):
        for side, shape in (("A", (RANK, linear.in_features)), ("B", (linear.out_features, RANK))):
            matrix = torch.randn(shape, generator=generator) * std
            weights[f"{_PREFIX}{name}.lora_{side}.weight"] = matrix
    write_weights(weights, directory)
    return directory


def write_weights(weights: dict[str, torch.Tensor], directory: Path, **changes: Any) -> None:
    """Write an adapter with these weights; ``changes`` are entries of its config."""
    targets = sorted(
        {name.removesuffix(".weight").rsplit(".", 2)[-2] for name in weights if ".lora_" in name}
    )
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
        "target_modules": targets, "bias": "none", "base_model_name_or_path": "base",
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config | changes))


def write_merged(checkpoint: Path, adapter: Path, directory: Path) -> Path:
    """Write the checkpoint with W + alpha / rank · B · A for each adapted W; return its folder."""
    weights = load_file(adapter / "adapter_model.safetensors")
    model = _load(checkpoint)
    for name, linear in _linears(model):
        down, up = (weights[f"{_PREFIX}{name}.lora_{side}.weight"] for side in "AB")
        linear.weight.data += ALPHA / RANK * (up @ down)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)
    return directory


def _load(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        assert not isinstance(module, Conv1D), "vLLM takes no adapters of GPT-2"
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in _UNADAPTED:
            yield name, module
