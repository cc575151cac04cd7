"""Printing an envoy, completing it, and the error for a name that it lacks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import nnsight_engine
from nnsight_engine.envoys.cache import cache_html
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.eproperty import eproperty, requires_output
from nnsight_engine.modeling.base import NNsight
from tests.small_models import tiny_gpt2, tiny_llama


class Block(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Linear(8, width))


class Tiny(torch.nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(Block(width) for width in widths)
        self.head = torch.nn.Linear(4, 2, bias=False)


class BlockEnvoy(Envoy):
    @eproperty(key="output", description="the residual stream")
    @requires_output
    def hidden(self) -> None: ...

    @eproperty(key="output")
    @requires_output
    def unlisted(self) -> None: ...


@pytest.mark.parametrize("module", [Tiny(4, 4, 4), Tiny(4), torch.nn.Linear(2, 2), torch.nn.Sequential()])
def test_prints_as_torch_does(module: torch.nn.Module) -> None:
    assert repr(NNsight(module)) == str(NNsight(module)) == repr(module)


def test_equal_neighbours_are_shown_once() -> None:
    text = repr(NNsight(Tiny(4, 4, 4, 8, 8, 4)))
    assert re.findall(r"\((\S+)\): (?:(\d+) x )?Block", text) == [("0-2", "3"), ("3-4", "2"), ("5", "")]


def test_further_names_stand_beside_the_module_or_point_down_to_it() -> None:
    model = NNsight(
        Tiny(4, 4), rename={"head": ["unembed", "out"], ".h": "layers", "mlp": "ffn", "h.0": "first"}
    )
    lines = repr(model).splitlines()
    assert lines[1] == "  (h/layers): ModuleList("
    assert "      (mlp/ffn): Sequential(" in lines
    assert lines[-3:] == [
        "  (head/unembed/out): Linear(in_features=4, out_features=2, bias=False)",
        "  (first) -> h.0",
        ")",
    ]


def test_a_named_block_is_not_grouped_away() -> None:
    text = repr(NNsight(Tiny(4, 4, 4), rename={"1": "middle"}))
    assert re.findall(r"\((\S+)\): (?:\d+ x )?Block", text) == ["0", "1/middle", "2"]


def test_properties_with_a_description_are_listed() -> None:
    text = repr(NNsight(Tiny(4, 4), envoys={Block: BlockEnvoy}))
    assert "    (0-1): 2 x Block(\n      .hidden: the residual stream\n      (attn): Linear(" in text
    assert "unlisted" not in text


def test_notebooks_get_a_tree_to_open_with_everything_escaped() -> None:
    class Sly(torch.nn.Module):
        def extra_repr(self) -> str:
            return "<script>alert('x')</script> & more"

    html = NNsight(
        torch.nn.Sequential(torch.nn.Sequential(Sly(), Sly()), torch.nn.Linear(1, 1))
    )._repr_html_()
    assert html.count("<details open>") == 1
    assert html.count("<details") == html.count("</details>") == 2
    assert "<script>" not in html
    assert "(0-1): 2 x Sly(&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; more)" in html


def test_dir_offers_children_further_names_properties_and_the_modules_own() -> None:
    model = NNsight(Tiny(4), rename={"h": "layers", "nowhere": "layers"}, envoys={Block: BlockEnvoy})
    assert {"h", "layers", "head", "trace", "output", "state_dict"} <= set(dir(model))
    assert {"attn", "mlp", "hidden", "output"} <= set(dir(model.h[0]))
    assert {"weight", "bias", "in_features"} <= set(dir(model.head))
    assert not {"nothing", "0"} & {*dir(model), *dir(model.h)}


@pytest.mark.parametrize(
    ("path", "name", "hint"),
    [
        ("model", "mlp", " There is model.h.0.mlp, and 1 more."),
        ("model", "haed", " Did you mean 'head'?"),
        ("model", "layer", " Did you mean 'layers'?"),
        ("model", "self_attn", " Did you mean model.h.0.attn?"),
        ("model.h.0", "atn", " Did you mean 'attn'?"),
        ("model", "genrate", " Did you mean 'generate'?"),
        ("model", "xyzzy", ""),
    ],
)
def test_near_names_are_the_users_own_first(path: str, name: str, hint: str) -> None:
    model = NNsight(Tiny(4, 4), rename={"h": "layers"})
    model._module.generate = model._module.forward  # type: ignore[assignment] # a method of the user's own
    envoy = model if path == "model" else model.get(path)
    with pytest.raises(AttributeError) as caught:
        getattr(envoy, name)
    kind = type(envoy._module).__name__
    said = f"{kind} at {path} has no attribute {name}.{hint} print(model) shows the tree."
    assert str(caught.value) == said
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("make", "path", "name", "hint"),
    [
        (tiny_llama, "model", "transformer", "The blocks are model.model.layers, and model.layers in every"),
        (tiny_llama, "model", "gpt_neox", "The blocks are model.model.layers, and model.layers in every"),
        (tiny_llama, "model.model", "h", "The blocks are model.model.layers, and model.layers in every"),
        (tiny_llama, "model", "wte", "The embedding is model.model.embed_tokens, and model.embed in every"),
        (tiny_gpt2, "model", "model", "The blocks are model.transformer.h, and model.layers in every"),
        (
            tiny_gpt2,
            "model.transformer",
            "norm",
            "The final norm is model.transformer.ln_f, and model.norm in",
        ),
        (tiny_gpt2, "model.transformer.h.0", "self_attn", "Did you mean 'attn'?"),
    ],
)
def test_names_of_other_families_lead_to_the_same_place_here(
    make: Callable[[], torch.nn.Module], path: str, name: str, hint: str
) -> None:
    model = NNsight(make())
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name}. {hint}")):
        getattr(model.get(path), name)


def test_help_of_a_property_shows_its_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    model = NNsight(Tiny(4), envoys={Block: BlockEnvoy})
    help(model.h[0].output)
    assert "The return value of the call; assign to replace it." in capsys.readouterr().out
    block = model.h[0]
    help(block.hidden)
    assert "Help on eproperty" in capsys.readouterr().out
    exec("help(model.head.inputs)", {"model": model})
    assert "(args, kwargs)" in capsys.readouterr().out


def test_asking_whether_a_name_exists_does_not_draw_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def extra_repr(self: object) -> str:
        raise AssertionError

    monkeypatch.setattr(torch.nn.Linear, "extra_repr", extra_repr)
    assert not hasattr(NNsight(torch.nn.Linear(2, 2)), "nothing")


@pytest.fixture
def shell() -> InteractiveShell:
    return InteractiveShell()


def completed(shell: InteractiveShell, text: str) -> set[str]:
    with provisionalcompleter():
        return {found.text.removeprefix(".") for found in shell.Completer.completions(text, len(text))}


def test_ipython_completes_children_and_further_names(shell: InteractiveShell) -> None:
    shell.user_ns["model"] = NNsight(Tiny(4), rename={"h": "layers"})
    assert "head" in completed(shell, "model.he")
    assert "layers" in completed(shell, "model.lay")


def test_ipython_extension_completes_behind_an_index(shell: InteractiveShell) -> None:
    shell.user_ns["model"] = NNsight(Tiny(4), rename={"h": "layers"}, envoys={Block: BlockEnvoy})
    nnsight_engine.load_ipython_extension(shell)
    assert {"attn", "hidden"} <= completed(shell, "model.h[0].")
    assert "weight" in completed(shell, "model.layers[-1].attn.we")


def test_a_cache_is_shown_in_a_notebook_by_module_with_shapes() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))
    with model.trace(torch.ones(1, 3)) as tracer:
        cache = tracer.cache(include_inputs=True)
    shown = cache._repr_html_()
    assert "<summary>CacheView(all: 3 modules)</summary>" in shown
    assert "<summary>model.0</summary>" in shown
    assert "<div>output: float32[1, 2]</div>" in shown
    assert "<div>input: ((float32[1, 3]), {})</div>" in shown


def test_names_in_a_cache_are_no_html() -> None:
    shown = cache_html("all", {"model.<b>": {"output": [torch.ones(2), {"<i>": None}]}})
    assert "<b>" not in shown
    assert "&lt;b&gt;" in shown
    assert "output, call 1: {&lt;i&gt;: None}" in shown
