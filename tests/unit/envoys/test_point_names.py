"""Standard points beside what else has a name: a user's aliases and classes, modules, other architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from nnsight_engine.core.saves import save
from nnsight_engine.envoys.architectures.architecture import architecture_of
from nnsight_engine.envoys.architectures.named_points import NoStandardPointsError, PatternError
from nnsight_engine.envoys.architectures.views import AttentionEnvoy
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.modeling.base import NNsight
from nnsight_engine.modeling.language import LanguageModel
from tests.families.checkpoints import build_config, build_tokenizer

IDS = torch.tensor([[45, 257, 80, 301]])


def build(family: str = "llama", auto: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    """A family's model with weights of its own making."""
    config = build_config(family, vocab_size=320)
    config.num_hidden_layers = 2
    for name, value in settings.items():
        setattr(config, name, value)
    return auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


class Named(torch.nn.Module):
    """Has modules that are called what standard points are."""

    def __init__(self) -> None:
        super().__init__()
        self.points = torch.nn.Linear(2, 2)
        self.logits = torch.nn.Linear(2, 2)
        self.embed = torch.nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.logits(self.points(self.embed(value)))
        return result


class MyAttention(Envoy):
    """Stands for attention in place of ours."""


def test_a_module_of_an_unknown_kind_says_what_is_missing() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(NoStandardPointsError, match="not a model of the transformers library"):
        model.points()
    with pytest.raises(NoStandardPointsError, match="no standard points"):
        model.points["layers.0.output"]
    assert "embed.output" not in model.points
    assert "no standard points" in repr(model.points)
    assert not hasattr(model, "logits")
    assert not hasattr(model, "embed")


def test_a_decoder_of_no_table_has_the_residual_stream() -> None:
    module = build()
    module.config.model_type = "mamba"
    stream = [f"layers.{layer}.{side}" for layer in range(2) for side in ("input", "output")]
    assert list(NNsight(module).points) == ["embed.output", *stream, "norm.output", "logits"]


def test_a_model_of_another_structure_has_no_points() -> None:
    module = build()
    module.config.model_type = "mamba"
    module.config.num_hidden_layers = 3
    assert architecture_of(module) is None
    with pytest.raises(NoStandardPointsError, match="num_hidden_layers"):
        NNsight(module).points()


def test_modules_keep_the_names_that_standard_points_have_elsewhere() -> None:
    module = Named()
    model: Any = NNsight(module)
    with torch.no_grad(), model.trace(torch.ones(1, 2)):
        embedded = model.embed.output.save()
        points = model.points.output.save()
        model.logits.output = torch.zeros(1, 2)
        output = model.output.save()
    assert torch.equal(points, module.points(embedded))
    assert not output.any()


def test_a_module_called_act_keeps_its_name() -> None:
    model = NNsight(build("gpt2"))
    with torch.no_grad(), model.trace(IDS):
        by_module = model.layers[0].mlp.act.output.save()
        by_point = model.points["layers.0.mlp.act"].save()
    assert torch.equal(by_module, by_point)


def test_a_users_further_names_stand_beside_ours() -> None:
    model = NNsight(build(), rename={"model.layers": "blocks", "self_attn": ["attention"]})
    assert model.blocks is model.layers is model.model.layers
    assert model.layers[0].attention is model.layers[0].attn


def test_a_users_further_name_counts_where_both_give_it() -> None:
    model = NNsight(build(), rename={"model.layers.1": "layers", "lm_head": "logits"})
    assert model.layers is model.model.layers[1]
    assert model.logits is model.lm_head
    with torch.no_grad(), model.trace(IDS):
        assert model.points["layers.0.output"].shape == (1, 4, 128)


def test_a_users_classes_stand_in_place_of_ours() -> None:
    module = build()
    attention = type(module.model.layers[0].self_attn)
    for envoys in ({attention: MyAttention}, {torch.nn.Module: MyAttention}, MyAttention):
        model = NNsight(module, envoys=envoys)
        assert type(model.layers[0].self_attn) is MyAttention
    assert type(NNsight(module, envoys=None).layers[0].attn) is Envoy
    mapped = NNsight(module, envoys={torch.nn.Linear: MyAttention})
    assert type(mapped.layers[0].attn) is AttentionEnvoy
    assert type(mapped.lm_head) is MyAttention


def test_points_need_no_classes() -> None:
    model = NNsight(build(), envoys=None)
    with torch.no_grad(), model.trace(IDS):
        pattern = model.points["layers.1.attn.pattern"].save()
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 4, 4))


def test_a_model_without_a_head_has_all_points_but_logits() -> None:
    for family in ("llama", "gpt2", "opt", "gpt_neox"):
        whole, body = NNsight(build(family)), NNsight(build(family, AutoModel))
        assert whole.points().keys() - body.points().keys() == {"logits"}
        with torch.no_grad(), body.trace(IDS):
            for name in body.points:
                assert body.points[name].shape[0] == 1


def test_scores_of_classes_are_no_logits_of_tokens() -> None:
    model = NNsight(build("llama", AutoModelForSequenceClassification))
    assert "logits" not in model.points
    assert "layers.1.output" in model.points


def test_an_mlp_without_a_module_of_its_own_lists_its_points() -> None:
    model = NNsight(build("opt"))
    assert dir(model.layers[0].mlp) == ["act", "input", "output", "up"]
    with pytest.raises(AttributeError, match="gate"):
        _ = model.layers[0].mlp.gate


def test_a_failed_trace_leaves_the_model_as_it_was() -> None:
    module = build()
    model = NNsight(module)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), model.trace(IDS):
        _ = model.layers[0].attn.pattern, 1 / 0
    with pytest.raises(RuntimeError), torch.no_grad(), model.trace(IDS):
        _ = model.layers[0].attn.pattern
        model.layers[0].output = torch.zeros(1, 4, 3)
    assert all(part.config is module.config for part in module.modules() if hasattr(part, "config"))


def test_attention_that_gives_no_probabilities_is_refused() -> None:
    model = NNsight(build("gpt2", reorder_and_upcast_attn=True))
    with pytest.raises(PatternError, match="reorder_and_upcast_attn"), model.trace(IDS):
        _ = model.layers[0].attn.pattern
    module = build()
    module.model.layers[0].self_attn.config = build_config("llama", vocab_size=320)
    module.model.layers[0].self_attn.config._attn_implementation = "flex_attention"
    model = NNsight(module)
    with pytest.raises(PatternError, match="flex_attention"), model.trace(IDS):
        _ = model.layers[0].attn.pattern


def test_every_step_of_a_generation_has_its_points() -> None:
    for family in ("llama", "opt"):
        module = build(family)
        model = LanguageModel(module, tokenizer=build_tokenizer())
        shapes = []
        sampling = {"min_new_tokens": 3, "max_new_tokens": 3, "do_sample": False}
        with torch.no_grad(), model.generate(IDS, **sampling) as tracer:
            for _ in tracer.iter[:]:
                layer = model.layers[1]
                shapes.append(
                    [
                        tuple(value.shape)
                        for value in (layer.attn.pattern, layer.attn.heads, layer.mlp.act, model.logits)
                    ]
                )
            save(shapes)
        assert [one[0] for one in shapes] == [(1, 4, 4, 4), (1, 4, 1, 5), (1, 4, 1, 6)], family
        assert [one[2] for one in shapes] == [(1, 4, 192), (1, 1, 192), (1, 1, 192)], family


def test_a_scan_knows_shapes_of_points() -> None:
    model = NNsight(build("phi3"))
    with model.scan(IDS):
        inside = tuple(model.points["layers.1.attn.pattern"].shape)
        save(inside)
    assert inside == (1, 4, 4, 4)
    assert model.points["layers.1.attn.k"].shape == (1, 4, 2, 32)
    assert model.layers[1].mlp.gate.shape == (1, 4, 192)


@pytest.mark.parametrize("where", ["itself", "in a list", "added later"])
@pytest.mark.parametrize(
    "place",
    [
        lambda model: model,
        lambda model: model.layers[0].mlp,
        lambda model: model.embed,
        lambda model: model.points,
        lambda model: model.layers[0].mlp.source,
        lambda model: next(iter(model.layers[0].mlp.source)),
    ],
    ids=["model", "module", "group", "points", "source", "operation"],
)
def test_places_are_no_values_to_save(where: str, place: Callable[[Any], Any]) -> None:
    model = NNsight(build())
    with pytest.raises(TypeError, match=r"output\.save\(\)"), torch.no_grad(), model.trace(IDS):
        found: list[Any] = save([])
        if where == "itself":
            save(place(model))
        elif where == "in a list":
            save({"found": [place(model)]})
        else:
            found.append(place(model))
