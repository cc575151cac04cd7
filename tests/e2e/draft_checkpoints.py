"""Checkpoints of draft models, made from the model that they draft for."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.checkpoints import write_checkpoint

_FOLDERS: Final[list[tempfile.TemporaryDirectory[str]]] = []
"""Drafts, until the process ends."""


def _folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    _FOLDERS.append(folder)
    return Path(folder.name)


@functools.cache
def first_layer(model: Path) -> Path:
    """Write a draft model: the embedding, the first layer and the unembedding of a model."""
    folder = _folder()
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    config.num_hidden_layers = 1
    draft = AutoModelForCausalLM.from_pretrained(model, config=config, local_files_only=True)
    draft.save_pretrained(folder)
    return folder


@functools.cache
def eagle(model: Path, method: str) -> Path:
    """Write a random draft model of method ``eagle`` or ``eagle3`` for a Llama model."""
    config: Any = AutoConfig.from_pretrained(model, local_files_only=True)
    is_third = method == "eagle3"
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer, read = ("midlayer", 2 * hidden) if is_third else ("layers.0", hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, (3 if is_third else 2) * hidden),
        f"{layer}.self_attn.q_proj.weight": (heads, read),
        f"{layer}.self_attn.k_proj.weight": (kv_heads, read),
        f"{layer}.self_attn.v_proj.weight": (kv_heads, read),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if is_third:
        shapes |= {
            f"{layer}.hidden_norm.weight": (hidden,),
            f"{layer}.input_layernorm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (config.vocab_size, hidden),
        }
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.1
        for name, shape in shapes.items()
    }
    folder = _folder()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    written = config.to_dict() | {"num_hidden_layers": 1}
    written["architectures"] = ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"]
    written.pop("layer_types", None)
    if is_third:
        written |= {"draft_vocab_size": config.vocab_size, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@functools.cache
def mtp(model: Path) -> Path:
    """Write a draft model of method ``mtp`` for a Llama model: MiMo's layer, with the weights of the first.

    vLLM reads its number of layers in the model's own configuration, as ``num_nextn_predict_layers``.
    """
    first = AutoModelForCausalLM.from_pretrained(first_layer(model), local_files_only=True)
    layer = "model.mtp_layers.0"
    weights = {
        name.replace("model.layers.0", layer).replace(
            "model.norm", f"{layer}.final_layernorm"
        ): weight.clone()
        for name, weight in first.state_dict().items()
    }
    for projection in ("q_proj", "k_proj", "v_proj"):
        name = f"{layer}.self_attn.{projection}"
        weights[f"{name}.bias"] = torch.zeros(len(weights[f"{name}.weight"]))
    width = first.config.hidden_size
    nothing, same = torch.zeros(width, width), torch.eye(width)
    weights |= {
        f"{layer}.hidden_layernorm.weight": torch.ones(width),
        f"{layer}.token_layernorm.weight": _scale(weights["model.embed_tokens.weight"]).repeat(width),
        f"{layer}.input_proj.weight": torch.cat([nothing, same], dim=1),  # of hidden state and embedding
    }
    folder = _folder()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    written = first.config.to_dict() | {"architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def write_with_mtp(folder: Path) -> Path:
    """Write a model of GLM-4.5's form whose checkpoint has an MTP layer, some of whose drafts are accepted.

    A next token depends on the last one more than on those before. The MTP layer is a copy of the model's
    last one, and reads the embedding and a little of the hidden state.
    """
    write_checkpoint("glm4_moe", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 200
    config = json.loads((folder / "config.json").read_text())
    width, num_layers = config["hidden_size"], config["num_hidden_layers"]
    last, layer = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    weights |= {
        name.replace(last, layer): weight.clone() for name, weight in weights.items() if name.startswith(last)
    }
    scale = _scale(weights["model.embed_tokens.weight"])
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
    weights |= {
        f"{layer}enorm.weight": scale.repeat(width),
        f"{layer}hnorm.weight": torch.ones(width),
        f"{layer}eh_proj.weight": torch.cat([torch.eye(width), 0.3 * noise], dim=1),
        f"{layer}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{layer}shared_head.norm.weight": weights["model.norm.weight"].clone(),
        f"{layer}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def _scale(embedding: torch.Tensor) -> torch.Tensor:
    return embedding.pow(2).mean().sqrt()
