"""``envoys=``: which class of one's own stands for which module; what such classes can do is in ``guide``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import Envoy, NNsight, eproperty
from nnsight_engine.envoys.eproperty import requires_output


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)


class LocalAttention(Attention):
    pass


class Block(torch.nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.self_attn = attention()
        self.mlp = torch.nn.Linear(8, 8)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(Attention), Block(LocalAttention)])
        self.norm = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.lm_head(self.norm(x)))


class AttnEnvoy(Envoy):
    pass


class BlockEnvoy(Envoy):
    pass


class OtherEnvoy(Envoy):
    pass


@pytest.fixture
def net() -> Net:
    return Net()


def test_no_map_means_plain_envoys(net: Net) -> None:
    for model in (NNsight(net), NNsight(net, envoys=None)):
        assert {type(envoy) for envoy in model.modules()[1:]} == {Envoy}


def test_one_class_stands_for_every_descendant(net: Net) -> None:
    model = NNsight(net, envoys=BlockEnvoy)
    assert type(model) is NNsight
    assert {type(envoy) for envoy in model.modules()[1:]} == {BlockEnvoy}


def test_map_goes_by_the_modules_class_and_its_bases(net: Net) -> None:
    model = NNsight(net, envoys={Attention: AttnEnvoy, Block: BlockEnvoy})
    assert [type(layer) for layer in model.layers] == [BlockEnvoy, BlockEnvoy]
    assert [type(layer.self_attn) for layer in model.layers] == [AttnEnvoy, AttnEnvoy]
    assert type(model.layers[0].mlp) is type(model.lm_head) is Envoy


def test_the_nearest_base_wins(net: Net) -> None:
    model = NNsight(
        net, envoys={torch.nn.Module: OtherEnvoy, Attention: AttnEnvoy, LocalAttention: BlockEnvoy}
    )
    assert type(model.layers[0].self_attn) is AttnEnvoy
    assert type(model.layers[1].self_attn) is BlockEnvoy
    assert type(model.lm_head) is OtherEnvoy


@pytest.mark.parametrize("dot", ["", "."])
@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("self_attn", ["layers.0.self_attn", "layers.1.self_attn"]),
        ("0.self_attn", ["layers.0.self_attn"]),
        ("layers.1.self_attn", ["layers.1.self_attn"]),
        ("model.layers.1.self_attn", ["layers.1.self_attn"]),
        ("attn", ["layers.0.self_attn", "layers.1.self_attn"]),
        ("blocks.0.attn", ["layers.0.self_attn"]),
        ("stack.0.self_attn", ["layers.0.self_attn"]),
        ("unembed", ["lm_head"]),
        ("f_attn", []),
        ("layers.self_attn", []),
        ("proj.layers", []),
    ],
)
def test_map_goes_by_the_end_of_a_path_under_any_name(net: Net, dot: str, end: str, found: list[str]) -> None:
    rename = {"layers": ["blocks", "stack"], "self_attn": "attn", ".lm_head": "unembed"}
    model = NNsight(net, envoys={f"{dot}{end}": BlockEnvoy}, rename=rename)
    paths = [path for path, envoy in model.named_modules() if type(envoy) is BlockEnvoy]
    assert paths == [f"model.{path}" for path in found]


def test_names_of_what_lies_deep_are_ends_too() -> None:
    model = NNsight(
        torch.nn.Sequential(Net()),
        envoys={"attentions.proj": BlockEnvoy, "last": AttnEnvoy},
        rename={"layers.0.self_attn": "attentions", "0.layers.1": "last"},
    )
    assert type(model[0].layers[0].self_attn.proj) is BlockEnvoy
    assert type(model[0].layers[1]) is AttnEnvoy
    assert type(model[0].layers[1].self_attn.proj) is Envoy


def test_the_longest_end_wins_and_any_end_before_classes(net: Net) -> None:
    model = NNsight(
        net,
        envoys={"self_attn": AttnEnvoy, "1.self_attn": OtherEnvoy, Attention: BlockEnvoy, "norm": AttnEnvoy},
    )
    assert [type(layer.self_attn) for layer in model.layers] == [AttnEnvoy, OtherEnvoy]
    assert type(model.norm) is AttnEnvoy
    assert type(model.lm_head) is Envoy


@pytest.mark.parametrize(
    "envoys", [{"": AttnEnvoy}, {"a..b": AttnEnvoy}, {3: AttnEnvoy}, {"a": 3}, "self_attn", Net]
)
def test_what_is_no_map_of_classes_is_refused(net: Net, envoys: Any) -> None:
    with pytest.raises(TypeError, match=r"envoys= takes a subclass of Envoy, or a mapping from classes"):
        NNsight(net, envoys=envoys)


def test_modules_added_later_are_mapped_too(net: Net) -> None:
    model = NNsight(net, envoys={Attention: AttnEnvoy})
    model.extra = Attention()
    assert type(model.extra) is AttnEnvoy


@pytest.mark.parametrize(
    "divide",
    [
        lambda value: value.unbind(2),
        list,
        lambda value: {"halves": value.chunk(2, dim=-1)},
        lambda value: value.split([1, 7], dim=-1),
    ],
)
def test_every_kind_of_view_can_be_edited_with_gradients_on(net: Net, divide: Any) -> None:
    class Divided(Envoy):
        @eproperty(key="output")
        @requires_output
        def parts(self) -> None: ...

        @parts.preprocess
        def _divided(self, value: torch.Tensor) -> Any:
            return divide(value)

    model = NNsight(net, envoys={torch.nn.LayerNorm: Divided})
    with model.trace(torch.randn(2, 3, 8)):
        parts = model.norm.parts
        for part in parts["halves"] if isinstance(parts, dict) else parts:
            part[:] = 0
        head = model.lm_head.input.save()
        result = model.output.save()
    assert (head == 0).all()
    result.sum().backward()
    assert net.lm_head.weight.grad is not None
    assert net.norm.weight.grad is not None
    assert (net.norm.weight.grad == 0).all()
