"""Gemma 3n of text alone is given its embeddings per layer, in memory that stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nnsight_engine.vllm_backend.steps.inputs_per_layer import supply_inputs_per_layer

LAYERS, SIZE, VOCABULARY, MAX_TOKENS = 3, 4, 11, 8


class Decoder(nn.Module):
    """The parts of vLLM's ``Gemma3nTextModel`` that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=LAYERS, hidden_size_per_layer_input=SIZE)
        self.embed_tokens = nn.Embedding(VOCABULARY, 2)
        self.per_layer = nn.Embedding(VOCABULARY, LAYERS * SIZE)

    def get_per_layer_input_embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.per_layer(ids)
        return embedded


class Gemma3nForCausalLM(nn.Module):
    """Returns the inputs per layer that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, *, per_layer_inputs: Any = None
    ) -> Any:
        return per_layer_inputs


class OtherModel(Gemma3nForCausalLM):
    """A model of another name."""


@torch.no_grad()
def test_the_model_of_text_gets_them_in_the_same_memory_in_each_step() -> None:
    model = Gemma3nForCausalLM()
    supply_inputs_per_layer(model, MAX_TOKENS)
    first, second = torch.tensor([3, 1, 4]), torch.tensor([1, 5])
    given = model(input_ids=first, positions=first)
    assert torch.equal(given, model.model.per_layer(first).view(-1, LAYERS, SIZE))
    again = model(second, second)
    assert torch.equal(again, model.model.per_layer(second).view(-1, LAYERS, SIZE))
    assert again.data_ptr() == given.data_ptr()


@torch.no_grad()
def test_given_inputs_and_embeddings_stay_as_they_are() -> None:
    model, ids = Gemma3nForCausalLM(), torch.tensor([2, 7])
    supply_inputs_per_layer(model, MAX_TOKENS)
    own = torch.ones(2, LAYERS, SIZE)
    assert model(ids, ids, per_layer_inputs=own) is own
    assert model(None, ids) is None


def test_other_models_are_left_alone() -> None:
    model = OtherModel()
    supply_inputs_per_layer(model, MAX_TOKENS)
    assert "forward" not in vars(model)
