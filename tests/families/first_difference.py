"""Where vLLM and transformers first differ: the first module with weights, of the same name in both.

``python -m tests.families.first_difference FAMILY [OPTIONS]`` writes a tiny random checkpoint and runs it in
float32 in both, vLLM without this project. OPTIONS are arguments of ``vllm.LLM`` as JSON. FAMILY is one of
``checkpoints`` or of ``OTHERS``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import Lfm2Config, PreTrainedConfig
from vllm import LLM, SamplingParams

from tests.families.checkpoints import build_tokenizer, write_checkpoint, write_model
from tests.families.reference import load_reference_model

PROMPT_IDS: Final = (45, 257, 80, 301, 77, 78, 260, 90, 91, 120, 33, 44)
_SMALLEST: Final = 1e-3
"""Smallest difference that counts, relative to the largest value; float32's rounding stays far below."""

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
OTHERS: Final[dict[str, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]]] = {
    "lfm2": (
        Lfm2Config,
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
        {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_use_swiglu": True},
    ),
}
"""Classes of configs, their settings, and entries that vLLM reads and transformers 5.19 does not write."""

Outputs = dict[str, torch.Tensor]


def write(family: str, directory: Path) -> Path:
    """Write a tiny random checkpoint of a family; return its folder."""
    if family not in OTHERS:
        return write_checkpoint(family, directory)
    config_class, settings, unwritten = OTHERS[family]
    write_model(config_class(vocab_size=len(build_tokenizer()), **settings), directory)
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **unwritten}))
    return directory


def outputs_of(model: nn.Module, run: Callable[[], object]) -> Outputs:
    """Return the first output of each module with weights in one run of the model, in order."""
    found: Outputs = {}
    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
        for name, module in model.named_modules()
        if next(module.children(), None) is None and next(module.parameters(), None) is not None
    ]

    def keep(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        found.setdefault(name, tensor.detach().clone())

    run()
    for handle in handles:
        handle.remove()
    return found


def first_difference(wanted: Outputs, got: Outputs) -> tuple[str, float] | None:
    """Return the first module of ``got`` that differs, and by how much of its largest value."""
    for name in [name for name in got if name in wanted]:
        whole = wanted[name].reshape(got[name].shape)
        difference = float((whole - got[name]).abs().max() / whole.abs().max())
        if difference > _SMALLEST:
            return name, difference
    return None


def main() -> None:
    """Print what differs."""
    family, *options = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write(family, Path(folder))
        reference: Any = load_reference_model(checkpoint)
        with torch.no_grad():
            wanted = outputs_of(reference, lambda: reference(torch.tensor([PROMPT_IDS]), use_cache=False))
        given = json.loads(options[0]) if options else {}
        engine = LLM(str(checkpoint), dtype="float32", enforce_eager=True, max_model_len=128, **given)
        worker: Any = engine.llm_engine.model_executor
        model = worker.driver_worker.worker.model_runner.model
        prompt: Any = {"prompt_token_ids": list(PROMPT_IDS)}
        once = SamplingParams(max_tokens=1)
        got = outputs_of(model, lambda: engine.generate(prompt, once))
    compared = len(got.keys() & wanted.keys())
    found = first_difference(wanted, got)
    said = "no difference" if found is None else f"{found[0]} differs by {found[1]:.2g} of its largest value"
    sys.stdout.write(f"{family}: {said} ({compared} modules compared)\n")


if __name__ == "__main__":
    main()
