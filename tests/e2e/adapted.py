"""A tiny model and two random LoRA adapters of it: fixtures of the modules that serve them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.family_check import Expected, expect
from tests.families.adapters import RANK, write_adapter, write_merged, write_weights
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

BASE, FIRST, SECOND = NAMES = ("base", "first", "second")
CONTEXT: Final = 128
BLOCK_SIZE: Final = 32
_FILE: Final = "adapter_model.safetensors"
ADAPTED: Final = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK))
"""vLLM's options for both adapters."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapted:
    """The checkpoint and its adapters.

    Attributes:
        base: The checkpoint.
        adapters: The adapters' folders, by name.
        merged: By all three names, the same as a checkpoint of its own.
    """

    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]


def write_adapted(family: str, folder: Path) -> Adapted:
    base = write_checkpoint(family, folder / BASE)
    adapters = {
        name: write_adapter(base, folder / name, seed=number) for number, name in enumerate(NAMES[1:], 1)
    }
    merged = {name: write_merged(base, one, folder / f"merged_{name}") for name, one in adapters.items()}
    return Adapted(base, adapters, {BASE: base, **merged})


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return write_adapted("llama", tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def expected(adapted: Adapted) -> dict[str, Expected]:
    """Compute what each of the three gives, with transformers."""
    found = {name: expect(folder) for name, folder in adapted.merged.items()}
    assert len({tuple(one.plain.token_ids) for one in found.values()}) == len(found)
    return found


Weights = dict[str, torch.Tensor]
_DOWN: Final = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
_UP: Final = _DOWN.replace("_A", "_B")


def _without(weights: Weights, name: str) -> Weights:
    return {other: one for other, one in weights.items() if other != name}


BROKEN: Final[dict[str, tuple[Callable[[Weights], Weights], dict[str, Any], str]]] = {
    "half the width": (
        lambda all_: {
            name: one[:, : HIDDEN_SIZE // 2] if "_A" in name else one for name, one in all_.items()
        },
        {},
        r"lora_A of '.*' must have the shape",
    ),
    "too wide": (
        lambda all_: all_ | {_UP: torch.zeros(512, RANK)},
        {},
        r"lora_B of '.*q_proj' must have the shape",
    ),
    "another rank": (lambda all_: all_, {"r": RANK // 2}, r"must have the shape \[4, "),
    "a vector": (lambda all_: all_ | {_DOWN: torch.zeros(RANK)}, {}, r"lora_A of '.*q_proj'"),
    "half": (lambda all_: _without(all_, _UP), {}, r"'model.layers.1.self_attn.q_proj' has no lora_B"),
    "no layer": (
        lambda all_: all_ | {_DOWN.replace("layers.1", "layers.99"): torch.ones(RANK, HIDDEN_SIZE)},
        {},
        r"model.layers.99.self_attn.q_proj",
    ),
    "twice": (
        lambda all_: all_ | {_DOWN.removeprefix("base_model.model."): all_[_DOWN].clone()},
        {},
        "are of the same module",
    ),
    "whole numbers": (
        lambda all_: all_ | {_DOWN: torch.ones(RANK, HIDDEN_SIZE, dtype=torch.int32)},
        {},
        "int32",
    ),
    "empty": (lambda _: {}, {"target_modules": ["q_proj"]}, "no tensors"),
    "NaN": (
        lambda all_: all_ | {_UP: all_[_UP] * float("nan")},
        {},
        r"q_proj' has numbers that are not finite",
    ),
    "a huge factor": (lambda all_: all_, {"lora_alpha": 1e300}, "not finite"),
    "no factor": (lambda all_: all_, {"lora_alpha": "16"}, "lora_alpha"),
    "rank 10^6": (lambda all_: all_, {"r": 10**6}, "rank"),
    "rank true": (lambda all_: all_, {"r": True}, ": r: "),
    "ia3": (lambda all_: all_, {"peft_type": "IA3"}, "peft_type.*IA3"),
    "transposed": (lambda all_: all_, {"fan_in_fan_out": True}, "fan_in_fan_out"),
    "a text for a truth value": (lambda all_: all_, {"use_rslora": "false"}, "use_rslora"),
    "unknown": (lambda all_: all_, {"use_magic": 3}, "'use_magic' has no effect"),
    "dora": (lambda all_: all_, {"use_dora": True}, "DoRA"),
}
"""Changes of the weights and the configuration of an adapter, and what the reason of its refusal matches."""


def write_broken(adapter: Path, kind: str, directory: Path) -> str:
    """Write one of ``BROKEN`` beside a good adapter; return what the reason for its refusal matches."""
    change, config, reason = BROKEN[kind]
    weights = {name: one.contiguous() for name, one in change(load_file(adapter / _FILE)).items()}
    write_weights(weights, directory, **config)
    return reason


UNREADABLE: Final[dict[str, tuple[str, bytes]]] = {
    "no JSON": ("adapter_config.json", b"{"),
    "a list": ("adapter_config.json", b"[]"),
    "deep": ("adapter_config.json", b"[" * 200_000),
    "no weights": (_FILE, b"\xff" * 64),
    "cut": (_FILE, b"\x08\0\0\0\0\0\0\0{}"),
}
"""What is written into a file of an adapter."""


def head_adapter(directory: Path) -> Path:
    """Write an adapter of the unembedding."""
    weights = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(RANK, HIDDEN_SIZE),
        "base_model.model.lm_head.lora_B.weight": torch.ones(319, RANK),
    }
    write_weights(weights, directory)
    return directory
