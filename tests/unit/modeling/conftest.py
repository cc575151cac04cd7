"""Tiny models of a few families, each loaded once by us and once by transformers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from nnsight_engine.modeling.language import LanguageModel
from tests.families.checkpoints import write_checkpoint

LONG = " the city is good and the tower of Paris"
SHORT = " Rome is"


@dataclass
class Pair:
    """One checkpoint, loaded twice."""

    path: Path
    model: LanguageModel
    plain: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def logits(self, text: str) -> torch.Tensor:
        """Return transformers' logits for one text, ``[num_tokens, vocab]``."""
        with torch.no_grad():
            logits: torch.Tensor = self.plain(**self.tokenizer(text, return_tensors="pt")).logits[0]
        return logits

    def continuation(self, text: str, num_tokens: int) -> list[int]:
        """Return the tokens that transformers generates after one text."""
        encoded = self.tokenizer(text, return_tensors="pt")
        tokens = self.plain.generate(**encoded, min_new_tokens=num_tokens, max_new_tokens=num_tokens)
        continuation: list[int] = tokens[0, encoded["input_ids"].shape[1] :].tolist()
        return continuation


def load(path: Path) -> Pair:
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = LanguageModel(path, dtype=torch.float32, dispatch=True)
    return Pair(path, model, plain, AutoTokenizer.from_pretrained(path))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(family, root / family) for family in ("gpt2", "llama", "opt")}


@pytest.fixture(scope="session", params=["gpt2", "llama", "opt"])
def pair(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Pair:
    return load(checkpoints[request.param])


@pytest.fixture(scope="session")
def gpt2(checkpoints: dict[str, Path]) -> Pair:
    return load(checkpoints["gpt2"])
