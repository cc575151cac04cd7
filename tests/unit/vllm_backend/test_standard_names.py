"""The client's standard names of an engine's model: no engine, and nothing behind them but names."""

from __future__ import annotations

import dataclasses

import pytest

from nnsight_engine.core.model_spec import LeafSpec
from nnsight_engine.envoys.architectures.errors import UnknownPointError
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.families.dense import LLAMA, LLAMA_LEAVES
from nnsight_engine.families.places import Place
from nnsight_engine.families.registry import engine_family
from nnsight_engine.vllm_backend.model_layout import BlockPoints, ModelLayout
from nnsight_engine.vllm_backend.model_outline import outlined
from nnsight_engine.vllm_backend.traces.points import EnginePoints, StandardNames, standard_name
from tests.fakes.model_specs import tiny_spec

MODULES = {
    "LlamaForCausalLM": (
        "model.layers",
        "model.norm",
        ("self_attn", "self_attn.qkv_proj", "self_attn.attn", "mlp", "mlp.gate_up_proj"),
    ),
    "GPT2LMHeadModel": ("transformer.h", "transformer.ln_f", ("attn", "attn.attn", "mlp", "mlp.act")),
    "OPTForCausalLM": ("model.decoder.layers", "", ("self_attn", "fc1", "fc2")),
}


def points_of(architecture: str, *leaves: str) -> EnginePoints:
    """Return the points of a model of two layers."""
    layers, norm, parts = MODULES[architecture]
    paths = dict.fromkeys((*_parents(layers), layers, *filter(None, [norm])))
    for layer in range(2):
        paths |= {f"{layers}.{layer}": None, **{f"{layers}.{layer}.{part}": None for part in parts}}
    root = StandardNames(
        outlined([("", architecture, "", ""), *((path, "Module", "", "") for path in paths)])
    )
    family = engine_family(architecture, [architecture])
    assert family is not None
    block = BlockPoints(
        {leaf: place for leaf, place in family.leaves.items() if isinstance(place, Place)}, family.kernel
    )
    names = ("embed.output", "input", "output", *leaves, *(["norm.output"] if norm else []), "logits")
    spec = dataclasses.replace(
        tiny_spec(architecture=architecture, num_layers=2, layout=ModelLayout(family, (block, block))),
        leaves=tuple(LeafSpec(name, (8,), "tap", ()) for name in names),
    )
    points = root.__dict__["_points"] = EnginePoints.on_client(root, spec)
    return points


def _parents(path: str) -> list[str]:
    parts = path.split(".")[:-1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


@pytest.mark.parametrize(
    "name", ["points", "layers", "norm", "embed", "layers.1", "layers.1.attn", "layers.0.mlp"]
)
def test_every_name_is_found_again(name: str) -> None:
    points = points_of("LlamaForCausalLM", "attn.q", "mlp.output")
    assert standard_name(points.standard(name)) == name
    assert standard_name(points.root) is standard_name("layers") is None


def test_a_module_hides_the_point_of_its_name() -> None:
    layers = points_of("GPT2LMHeadModel", "mlp.act", "attn.heads").standard("layers")
    assert isinstance(layers[0].mlp.act, Envoy)
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.heads"):
        _ = layers[0].attn.heads


def test_parts_that_are_no_modules_have_points_alone() -> None:
    points = points_of("OPTForCausalLM", "mlp.up")
    mlp = points.standard("layers")[1].mlp
    assert standard_name(mlp) == "layers.1.mlp"
    assert dir(mlp) == ["up"]
    with pytest.raises(UnknownPointError, match=r"norm\.output"):
        points.standard("norm")


def test_hostile_names_are_unknown_points() -> None:
    points = points_of("LlamaForCausalLM")
    for name in ("", "layers", "layers.", "layers.0", "layers.-9.output", "layers.*.output", "x" * 10_000):
        with pytest.raises(UnknownPointError):
            _ = points[name]


def test_there_is_no_pattern_where_positions_attend_to_later_ones() -> None:
    causal = BlockPoints(LLAMA_LEAVES, LLAMA.kernel, num_heads=2, num_kv_heads=1, head_dim=4)
    shapes, others = causal.shapes(8), dataclasses.replace(causal, is_causal=False).shapes(8)
    assert shapes.keys() - others.keys() == {"attn.pattern"}
