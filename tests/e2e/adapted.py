"""A tiny model and two random LoRA adapters of it: fixtures of the modules that serve them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import pytest
import torch

from tests.e2e.family_check import Expected, expect
from tests.families.adapters import RANK, write_adapter, write_merged, write_weights
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

BASE, FIRST, SECOND = NAMES = ("base", "first", "second")
CONTEXT: Final = 128
BLOCK_SIZE: Final = 32
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


def head_adapter(directory: Path) -> Path:
    """Write an adapter of the unembedding."""
    weights = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(RANK, HIDDEN_SIZE),
        "base_model.model.lm_head.lora_B.weight": torch.ones(319, RANK),
    }
    write_weights(weights, directory)
    return directory
