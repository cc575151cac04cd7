"""The client's standard names of an engine's model: no engine, and nothing behind them but names."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nnsight_engine.core.model_spec import LeafSpec
from nnsight_engine.envoys.architectures.errors import UnknownPointError
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.families.dense import LLAMA, LLAMA_LEAVES
from nnsight_engine.families.places import Place
from nnsight_engine.families.registry import engine_family
from nnsight_engine.vllm_backend.model_layout import BlockPoints, ModelLayout
from nnsight_engine.vllm_backend.model_outline import outlined
from nnsight_engine.vllm_backend.traces.caches import RequestCache
from nnsight_engine.vllm_backend.traces.points import EnginePoints, Part, StandardNames, standard_name
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


def test_other_things_have_no_standard_name() -> None:
    assert standard_name(points_of("LlamaForCausalLM").root) is None
    assert standard_name("layers") is None


def test_points_are_listed_in_the_models_order() -> None:
    points = points_of("LlamaForCausalLM", "mlp.output", "attn.q")
    layer = ["input", "attn.q", "mlp.output", "output"]
    listed = [f"layers.{number}.{leaf}" for number in range(2) for leaf in layer]
    assert list(points()) == ["embed.output", *listed, "norm.output", "logits"]
    assert "layers.1.attn.q" in points
    assert "layers.1.attn.input" not in points


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


def test_a_path_is_a_standard_name_or_the_modules_as_printed() -> None:
    root = points_of("LlamaForCausalLM", "mlp.output").root
    for path in ("layers.1.mlp", "model.layers.1.mlp"):
        part = root.get(path)
        assert isinstance(part, Part)
        assert (part.place, part.path) == ("layers.1.mlp", "model.model.layers.1.mlp")
    raw = root.get("model.model.layers.1.mlp")
    assert isinstance(raw, Envoy)
    assert raw.path == "model.model.layers.1.mlp"
    for path, envoy in root.named_modules():
        assert root.get(path) is envoy


def test_a_cache_leads_on_from_the_root_to_standard_names() -> None:
    root = points_of("LlamaForCausalLM", "mlp.output").root
    cache = RequestCache()
    for path, _ in root.named_modules():
        cache.keep(f"{path}.output", (1, 0), torch.ones(2, 8))
    whole = cache.view(root)
    for view in (whole.model, whole["model"]):
        assert view.layers[1].mlp.output.shape == (2, 8)
    inside = whole.model.layers[1].items()
    assert [path for path, _ in inside] == [
        path for path in whole if f"{path}.".startswith("model.model.layers.1.")
    ]
    for path, view in [*inside, *whole.model.layers.items()]:
        assert view == whole[path]
        assert view._envoy is root.get(path)


def test_there_is_no_pattern_where_positions_attend_to_later_ones() -> None:
    causal = BlockPoints(LLAMA_LEAVES, LLAMA.kernel, num_heads=2, num_kv_heads=1, head_dim=4)
    shapes, others = causal.shapes(8), dataclasses.replace(causal, is_causal=False).shapes(8)
    assert shapes.keys() - others.keys() == {"attn.pattern"}
