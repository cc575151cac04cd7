"""The residual stream of small decoders of every kind is found, and what is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nnsight_engine.vllm_backend.structure import Runs, found_family

TOKENS, WIDTH, NUM_BLOCKS = 8, 16, 4


class Norm(nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        stream = hidden if residual is None else hidden + residual
        normed = nn.functional.rms_norm(stream, (WIDTH,))
        return normed if residual is None else (normed, stream)


class Block(nn.Module):
    """A block whose ``forward`` is given, of two projections."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = Norm()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned: Any = self.run(self, *args, **kwargs)
        return returned


class Decoder(nn.Module):
    """Embeddings, blocks, and a norm, joined as ``joined`` says."""

    def __init__(self, joined: Callable[[Decoder, torch.Tensor], Any], run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block(run) for _ in range(NUM_BLOCKS))
        self.norm = Norm()
        self.joined = joined

    def forward(self, ids: torch.Tensor) -> Any:
        return self.joined(self, self.embed(ids))


class DecoderRuns(Runs):
    """Runs one of the decoders."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.hidden_size, self.num_layers, self.is_last = model, WIDTH, NUM_BLOCKS, True

    def output(self) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = self.model(torch.arange(TOKENS))
        return output.reshape(TOKENS, WIDTH).clone()

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(1))
        scaled: torch.Tensor = noise * float(like.std())
        return scaled

    def is_stream(self, value: object) -> bool:
        shapes = {(TOKENS, WIDTH), (1, TOKENS, WIDTH)}
        return isinstance(value, torch.Tensor) and tuple(value.shape) in shapes


def alone(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = block.inner(block.norm(hidden))
    return hidden + added


def pair(block: Block, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
    del positions
    if residual is None:
        return block.inner(block.norm(hidden)), hidden
    normed, residual = block.norm(hidden, residual)
    return block.inner(normed), residual


def unused_residual(block: Block, positions: Any, hidden: torch.Tensor, residual: Any = None) -> Any:
    del positions, residual
    return alone(block, hidden), hidden


def through(model: Decoder, hidden: Any, *, scale: float = 1.0, backwards: bool = False) -> torch.Tensor:
    """Run blocks that pass one tensor on, alone or beside None."""
    for layer in [*model.layers][:: -1 if backwards else 1]:
        hidden = layer(hidden)
        hidden = hidden * scale if isinstance(hidden, torch.Tensor) else hidden[0]
    found: torch.Tensor = hidden
    return found


def in_a_row(model: Decoder, hidden: torch.Tensor) -> Any:
    return model.norm(through(model, hidden))


def in_pairs(model: Decoder, hidden: torch.Tensor, *, share: float = 1.0) -> Any:
    """Run blocks that pass a pair on, of which the norm adds a share of the second."""
    residual: Any = None
    for layer in model.layers:
        hidden, residual = layer(None, hidden, residual)
    return model.norm(hidden, residual * share)[0] if share else model.norm(hidden)


def named(model: Decoder, hidden: torch.Tensor) -> Any:
    for layer in model.layers:
        hidden = layer(positions=torch.arange(TOKENS), hidden=hidden)
    return model.norm(hidden)


def first_alone(model: Decoder, hidden: torch.Tensor) -> Any:
    for layer in model.layers:
        hidden, _ = layer(None, hidden)
    return model.norm(hidden)


def first_of_two(model: Decoder, hidden: torch.Tensor) -> Any:
    return in_pairs(model, hidden, share=0.0)


def batched(model: Decoder, hidden: torch.Tensor) -> Any:
    return in_a_row(model, hidden[None])[0]


FOUND: dict[str, tuple[Decoder, dict[str, Any]]] = {
    "one tensor": (Decoder(in_a_row, alone), {}),
    "a pair": (Decoder(in_pairs, pair), {"returns_residual": True, "hidden_index": 1}),
    "a batch of one": (Decoder(batched, alone), {"is_batched": True}),
    "a pair with None": (
        Decoder(in_a_row, lambda block, hidden: (alone(block, hidden), None)),
        {"returns_none": True},
    ),
    "a second tensor that nobody reads": (
        Decoder(first_of_two, unused_residual),
        {"returns_residual": True, "has_unused_residual": True, "hidden_index": 1},
    ),
    "a second tensor that is not passed on": (
        Decoder(first_alone, unused_residual),
        {"returns_residual": True, "has_unused_residual": True, "hidden_index": 1},
    ),
    "arguments by name": (
        Decoder(named, lambda block, positions, hidden: alone(block, hidden)),
        {"hidden_name": "hidden"},
    ),
}


@pytest.mark.parametrize("kind", FOUND)
def test_the_form_of_the_stream_is_found(kind: str) -> None:
    model, expected = FOUND[kind]
    plain = DecoderRuns(model).output()
    found = found_family(DecoderRuns(model))
    family = found.family
    assert (family.layers, family.final_norm) == ("layers", "norm"), found.remarks
    defaults = {"returns_residual": False, "has_unused_residual": False, "is_batched": False}
    wanted: dict[str, Any] = {**defaults, "returns_none": False, **expected}
    assert {name: getattr(family, name) for name in wanted} == wanted
    assert torch.equal(DecoderRuns(model).output(), plain)


def half_a_pair(model: Decoder, hidden: torch.Tensor) -> Any:
    return in_pairs(model, hidden, share=0.5)


def scaled_between(model: Decoder, hidden: torch.Tensor) -> Any:
    return model.norm(through(model, hidden, scale=0.9))


def backwards(model: Decoder, hidden: torch.Tensor) -> Any:
    return model.norm(through(model, hidden, backwards=True))


def all_for_nothing(model: Decoder, hidden: torch.Tensor) -> Any:
    in_a_row(model, hidden)
    return model.norm(hidden)


def different_each_time(model: Decoder, hidden: torch.Tensor) -> Any:
    return in_a_row(model, hidden + torch.rand(()))


def narrow(model: Decoder, hidden: torch.Tensor) -> Any:
    for layer in model.layers:
        layer(hidden)
    return model.norm(hidden)


@pytest.mark.parametrize(
    ("joined", "run", "seen"),
    [
        (half_a_pair, pair, "not the sum"),
        (scaled_between, alone, "does not receive the stream"),
        (all_for_nothing, alone, "does not reach"),
        (different_each_time, alone, "two runs on the same tokens differ"),
        (backwards, alone, "no list of blocks passes a stream"),
        (narrow, lambda block, hidden: alone(block, hidden)[:, :3], "no list of blocks passes a stream"),
    ],
    ids=lambda value: getattr(value, "__name__", "") or None,
)
def test_what_is_no_stream_is_refused(joined: Any, run: Any, seen: str) -> None:
    found = found_family(DecoderRuns(Decoder(joined, run)))
    assert found.family.layers == ""
    assert seen in found.remarks[0]


def kept_aside(model: Decoder, hidden: torch.Tensor) -> Any:
    first = hidden = model.layers[0](hidden)
    for layer in [*model.layers][1:]:
        hidden = layer(hidden)
    return model.norm(hidden + first)


def scaled_at_the_end(model: Decoder, hidden: torch.Tensor) -> Any:
    return in_a_row(model, hidden) * 0.1


@pytest.mark.parametrize(("joined", "seen"), [(kept_aside, "no lens"), (scaled_at_the_end, "no norm.output")])
def test_a_model_that_ends_in_more_than_a_norm_has_no_lens(joined: Any, seen: str) -> None:
    found = found_family(DecoderRuns(Decoder(joined, alone)))
    assert found.family.layers == "layers"
    assert found.family.final_norm == ""
    assert seen in found.remarks[1]
