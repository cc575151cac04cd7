"""``envoys=``: classes of one's own for modules, in every form, with properties of their own."""

# A property's functions have its name, as documented; mypy lets only `property` do so.
# mypy: disable-error-code="no-redef"

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import Envoy, NNsight, eproperty
from nnsight_engine.envoys.hooks import requires_input, requires_output

PROMPT = torch.randn(2, 3, 8)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = 4
        self.proj = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.proj(x))


class LocalAttention(Attention):
    pass


class Block(torch.nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.self_attn = attention()
        self.mlp = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = x + self.self_attn(x)
        return x + self.mlp(x), None


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(Attention), Block(LocalAttention)])
        self.norm = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return torch.as_tensor(self.lm_head(self.norm(x)))


class AttnEnvoy(Envoy):
    """Exposes attention output as a list of per-head views."""

    @eproperty(key="output")
    @requires_output
    def heads(self) -> None:
        """Per-head views of the attention output."""

    @heads.preprocess
    def heads(self, value: torch.Tensor) -> list[torch.Tensor]:
        b, s, h = value.shape
        n_heads: Any = self._module.n_heads
        return list(value.view(b, s, n_heads, h // n_heads).unbind(dim=2))

    def n(self) -> int:
        return int(self.n_heads)


class BlockEnvoy(Envoy):
    """Exposes the residual stream."""

    @eproperty(key="output")
    @requires_output
    def hidden(self) -> None:
        """The block's hidden-state output, unpacked from the tuple layout."""

    @hidden.preprocess
    def hidden(self, value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value

    @hidden.postprocess
    def hidden(self, value: Any) -> Any:
        return value, None


class CopiedEnvoy(Envoy):
    """Gives a copy, whose edits come back through ``transform``."""

    @eproperty(key="output")
    @requires_output
    def thing(self) -> None: ...

    @thing.preprocess
    def thing(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @thing.transform
    @staticmethod
    def thing(value: torch.Tensor) -> torch.Tensor:
        return value

    @eproperty(key="input")
    @requires_input
    def first(self) -> None: ...

    @first.preprocess
    def first(self, value: Any) -> Any:
        return value[0][0]


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
        net, envoys={torch.nn.Module: CopiedEnvoy, Attention: AttnEnvoy, LocalAttention: BlockEnvoy}
    )
    assert type(model.layers[0].self_attn) is AttnEnvoy
    assert type(model.layers[1].self_attn) is BlockEnvoy
    assert type(model.lm_head) is CopiedEnvoy


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
        envoys={"self_attn": AttnEnvoy, "1.self_attn": CopiedEnvoy, Attention: BlockEnvoy, "norm": AttnEnvoy},
    )
    assert [type(layer.self_attn) for layer in model.layers] == [AttnEnvoy, CopiedEnvoy]
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


def test_views_edit_the_model_in_place(net: Net) -> None:
    model = NNsight(net, envoys={Attention: AttnEnvoy})
    with model.trace(PROMPT):
        heads = model.layers[1].self_attn.heads.save()
        heads[3][:] = 0
        seen = model.layers[1].self_attn.output.save()
        result = model.output.save()
    assert [tuple(head.shape) for head in heads] == [(2, 3, 2)] * 4
    assert (seen[..., 6:] == 0).all()
    assert not (seen[..., :6] == 0).any()
    assert not torch.equal(result, net(PROMPT))


def test_methods_and_docstrings_are_the_classes_own(net: Net) -> None:
    model = NNsight(net, envoys={Attention: AttnEnvoy})
    assert model.layers[0].self_attn.n() == 4
    assert type(model.layers[0].self_attn).heads.__doc__ == "Per-head views of the attention output."


def test_preprocess_unpacks_and_postprocess_packs(net: Net) -> None:
    model = NNsight(net, envoys={Block: BlockEnvoy})
    with model.trace(PROMPT):
        hidden = model.layers[0].hidden.save()
        model.layers[0].hidden = torch.zeros_like(hidden)
        after = model.layers[1].input.save()
    assert hidden.shape == PROMPT.shape
    assert (after == 0).all()


def test_transform_takes_the_edited_copy_back(net: Net) -> None:
    model = NNsight(net, envoys={torch.nn.LayerNorm: CopiedEnvoy})
    with model.trace(PROMPT):
        given = model.norm.first.save()
        copied = model.norm.thing
        copied[:] = 0
        head = model.lm_head.input.save()
        result = model.output.save()
    assert given.shape == PROMPT.shape
    assert (head == 0).all()
    torch.testing.assert_close(result, net.lm_head(torch.zeros_like(PROMPT)))


class MyModel(NNsight):
    """A root class with classes for its parts, and what they need from elsewhere in the tree."""

    envoys = {Attention: AttnEnvoy, Block: BlockEnvoy}  # noqa: RUF012 - as people write it

    def __init__(self, name_or_model: str | torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        module = self._load_from_name(name_or_model) if isinstance(name_or_model, str) else name_or_model
        super().__init__(module, *args, **kwargs)
        for block in self.layers:
            block.__dict__["_lens_norm"] = self._module.norm
            block.__dict__["_lens_head"] = self._module.lm_head

    def _load_from_name(self, name: str) -> torch.nn.Module:
        assert name == "net"
        return Net()

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        if not inputs:
            return (), kwargs, 0
        return inputs, kwargs, len(inputs[0])

    def _batch(
        self, batched_input: Any, *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (before, *_), before_kwargs = batched_input
        return (torch.cat([before, inputs[0]]),), {**before_kwargs, **kwargs}


class LensEnvoy(Envoy):
    @eproperty(key="output")
    @requires_output
    def lens(self) -> None:
        """Logit-lens projection of this block's hidden state."""

    @lens.preprocess
    def lens(self, value: Any) -> Any:
        return self._lens_head(self._lens_norm(value[0]))


def test_root_class_sets_the_map_for_its_users() -> None:
    model = MyModel("net")
    assert type(model.layers[0]) is BlockEnvoy
    assert type(model.layers[0].self_attn) is AttnEnvoy


def test_users_override_the_root_classes_map_or_opt_out(net: Net) -> None:
    assert type(MyModel(net, envoys={Block: LensEnvoy}).layers[0]) is LensEnvoy
    assert type(MyModel(net, envoys=None).layers[0]) is Envoy


def test_property_reaches_across_the_tree(net: Net) -> None:
    model = MyModel(net, envoys={Block: LensEnvoy})
    with model.trace(PROMPT):
        tokens = [block.lens.argmax(-1).save() for block in model.layers]
        result = model.output.save()
    assert tokens[0].shape == (2, 3)
    torch.testing.assert_close(tokens[-1], result.argmax(-1))


def test_root_class_batches_its_invokes(net: Net) -> None:
    model = MyModel(net)
    with model.trace() as tracer:
        with tracer.invoke(PROMPT[:1]):
            one = model.layers[0].hidden.save()
        with tracer.invoke(PROMPT):
            two = model.layers[0].hidden.save()
        with tracer.invoke():
            all_rows = model.output.save()
    assert (len(one), len(two), len(all_rows)) == (1, 2, 3)


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
        def parts(self, value: torch.Tensor) -> Any:
            return divide(value)

    model = NNsight(net, envoys={torch.nn.LayerNorm: Divided})
    with model.trace(PROMPT):
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
