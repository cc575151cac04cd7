"""Standard points mean the same on every family: they read and write what plain hooks do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from api_schemas.points import MODEL_POINTS, VISION
from nnsight_engine.core.model_spec import EXPERTS, PATTERN, RESIDUAL_LEAVES, STATE
from nnsight_engine.core.saves import save
from nnsight_engine.envoys.architectures.expert_points import expert_weights
from nnsight_engine.envoys.architectures.named_points import PointValueError, UnknownPointError
from nnsight_engine.families.registry import ENGINE_FAMILIES
from nnsight_engine.interleaving.events import OutOfOrderError
from nnsight_engine.modeling.base import NNsight
from tests.families.checkpoints import (
    FAMILIES,
    LOCAL_FAMILIES,
    MECHANISMS,
    NUM_LAYERS,
    VARIANTS,
    write_checkpoint,
)
from tests.families.edits import place
from tests.families.experts import UNFORCED, factors_of, weights_of
from tests.families.moves import LAYER, move, moved, points_of_a_layer
from tests.families.reference import load_reference_model, reference_activations
from tests.families.trees import tree_of

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT_IDS = [45, 257, 80, 301, 77, 78, 260, 90]
IDS = torch.tensor([PROMPT_IDS])
PAIR = torch.tensor([PROMPT_IDS, PROMPT_IDS[::-1]])


@pytest.fixture(
    scope="module",
    params=[
        family if family in MECHANISMS + VARIANTS else pytest.param(family, marks=pytest.mark.heavy)
        for family in FAMILIES + LOCAL_FAMILIES + VARIANTS
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(str(request.param), tmp_path_factory.mktemp(str(request.param)))


@pytest.fixture(scope="module")
def module(checkpoint: Path) -> Any:
    """The family's model, with eager attention."""
    return load_reference_model(checkpoint)


@pytest.fixture
def model(module: Any) -> NNsight:
    return NNsight(module)


@contextmanager
def hooked(module: Any, name: str) -> Iterator[None]:
    """Let plain hooks make the change, at places written down apart from the engine's tables."""
    tree = tree_of(module.config)
    if name == f"layers.{LAYER}.attn.pattern":
        heads = tree.inputs["attn.heads"]
        blocks = list(module.get_submodule(tree.layers).children())[:LAYER]
        before = sum(heads in dict(block.named_modules()) for block in blocks)
        with changed_softmax(lambda number: number == before):
            yield
        return
    if name == f"layers.{LAYER}.input":
        handle = place(module, f"layers.{LAYER - 1}.output", move)
    elif name == "logits":
        handle = module.register_forward_hook(lambda _m, _a, output: move(output.logits))
    else:
        handle = place(module, name, move)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def changed_softmax(is_changed: Callable[[int], bool]) -> Iterator[None]:
    """Change the probabilities of some layers: only attention takes the softmax of four axes, once each."""
    original = torch.nn.functional.softmax
    calls = iter(range(NUM_LAYERS))

    def softmax(*args: Any, **kwargs: Any) -> torch.Tensor:
        value = original(*args, **kwargs)
        return moved(value) if value.ndim == 4 and is_changed(next(calls)) else value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


def movable(names: Iterable[str]) -> list[str]:
    """Return the points of a layer whose values can be moved: no ids of experts, and no states."""
    return [name for name in points_of_a_layer(names) if not name.endswith((EXPERTS, STATE))]


def stateless(names: Iterable[str]) -> list[str]:
    """Return the points that are there without a cache."""
    return [name for name in names if not name.endswith(STATE)]


def offered(model: NNsight, *names: str) -> list[str]:
    """Return those points of the first layer that has them that there are."""
    leaves = {name.split(".", 2)[-1]: name for name in points_of_a_layer(model.points)}
    return [leaves[name] for name in names if name in leaves]


def attribute(model: NNsight, name: str) -> tuple[Any, str]:
    """Return the object and the name of the attribute of a layer's point."""
    _, layer, part, leaf = name.split(".")
    return getattr(model.layers[int(layer)], part), leaf


def logits_of(module: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(IDS, use_cache=False).logits
    return logits


# Values.


def test_every_point_reads_what_hooks_on_transformers_read(checkpoint: Path, model: NNsight) -> None:
    expected = reference_activations(checkpoint, PROMPT_IDS)
    found = {}
    with torch.no_grad(), model.trace(IDS, use_cache=False):
        for name in stateless(model.points):
            found[name] = model.points[name].save()
    patterns = {name for name in found if name.endswith(PATTERN)}
    assert found.keys() - patterns == {*stateless(expected)}
    for name, value in expected.items():
        if name.endswith(STATE):
            continue  # see ``test_states``
        assert torch.equal(found[name][0], value), name


def test_patterns_are_the_attention_weights_that_transformers_returns(model: NNsight, module: Any) -> None:
    with torch.no_grad():
        output = module(PAIR, output_attentions=True, use_cache=False)
    found = []
    names = [name for name in model.points if name.endswith(PATTERN)]
    with torch.no_grad(), model.trace(PAIR, use_cache=False):
        for name in names:
            found.append(model.points[name].save())  # noqa: PERF401 - values come by one after the other
    # Attention that several blocks share has no points, and one that uses another layer's keys no pattern.
    returned = [one for one in output.get("attentions", ()) if one is not None] if names else []
    heads = [name for name in model.points if name.endswith("attn.heads") and names]
    patterns = [name.replace("heads", "pattern") for name in heads]
    expected = [one for name, one in zip(patterns, returned, strict=True) if name in names]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert bool(found) == tree_of(module.config).has_pattern


def test_shapes_are_those_that_the_list_says(model: NNsight) -> None:
    num_rows, num_tokens = PAIR.shape
    found = {}
    with torch.no_grad(), model.trace(PAIR):
        for name in points_of_a_layer(model.points):
            found[name] = model.points[name].shape
    for name, shape in model.points().items():
        if name.endswith(PATTERN) and name in found:
            assert found[name] == (num_rows, shape[0], num_tokens, num_tokens)
        elif name.endswith(STATE) and name in found:
            assert found[name] == (num_rows, *shape)
        elif name in found:
            assert found[name] == (num_rows, num_tokens, *shape), name


SERVED_AS = {"Ministral3ForCausalLM": "MistralForCausalLM", "PhimoeForCausalLM": "PhiMoEForCausalLM"}
"""vLLM's classes where they have other names."""


def test_every_assignment_and_edit_in_place_does_what_a_hook_does(model: NNsight, module: Any) -> None:
    for name in movable(model.points):
        with hooked(module, name):
            expected = logits_of(module)
        with torch.no_grad(), model.trace(IDS, use_cache=False):
            model.points[name] = moved(model.points[name])
            found = model.points["logits"].save()
        with torch.no_grad(), model.trace(IDS, use_cache=False):
            move(model.points[name])
            in_place = model.points["logits"].save()
        assert torch.equal(found, expected), name
        assert torch.equal(in_place, expected), name
        # Phi-MoE weights an expert with 1 unless another's logit is close.
        if not (module.config.model_type == "phimoe" and name.endswith("moe.router")):
            assert not torch.equal(found, logits_of(module)), name


def test_a_saved_value_keeps_its_numbers_when_the_point_is_assigned(model: NNsight) -> None:
    for name in movable(model.points):
        with torch.no_grad(), model.trace(IDS, use_cache=False):
            before = model.points[name].save()
            copy = before.clone().save()
            model.points[name] = moved(before)
        assert torch.equal(before, copy), name


def test_a_model_runs_as_before_when_the_trace_is_over(model: NNsight, module: Any) -> None:
    expected = logits_of(module)
    attributes = [set(vars(part)) for part in module.modules()]
    configs = [getattr(part, "config", None) for part in module.modules()]
    with torch.no_grad(), model.trace(IDS, use_cache=False):
        for name in model.points:
            if not name.endswith((EXPERTS, STATE)):
                move(model.points[name])
    assert torch.equal(logits_of(module), expected)
    assert [set(vars(part)) for part in module.modules()] == attributes
    after = [getattr(part, "config", None) for part in module.modules()]
    assert all(one is other for one, other in zip(after, configs, strict=True))


def test_the_weights_of_experts_are_those_of_the_router(checkpoint: Path, module: Any) -> None:
    activations, config = reference_activations(checkpoint, PROMPT_IDS), module.config
    tree, ours = tree_of(config), expert_weights(config)
    blocks = [*module.get_submodule(tree.layers).children()]
    for layer in range(NUM_LAYERS):
        if f"layers.{layer}.moe.router" not in activations:
            continue
        logits, ids, expected = (
            activations[f"layers.{layer}.moe.{leaf}"] for leaf in ("router", "experts", "weights")
        )
        assert (ours is None) == (config.model_type in UNFORCED)
        if ours is not None:
            factors = factors_of(blocks[layer], tree)
            torch.testing.assert_close(weights_of(config, logits, ids, factors), expected)
            torch.testing.assert_close(ours.weights_of(logits, ids, factors), expected)


# Names.


def test_the_vocabulary_is_that_of_the_server(model: NNsight, module: Any) -> None:
    class_name = SERVED_AS.get(type(module).__name__, type(module).__name__)
    family = next(
        family for family in ENGINE_FAMILIES if class_name in (family.architectures or family.model_classes)
    )
    leaves = {name.split(".", 2)[-1] for name in model.points if name.startswith("layers.")}
    # Experts have no neurons in common; a model of experts has them in its dense blocks only.
    neurons = {"mlp.gate", "mlp.up", "mlp.act"}
    stream = RESIDUAL_LEAVES if tree_of(module.config).has_stream else ()
    expected = {*family.leaves, *stream, *([PATTERN] if tree_of(module.config).has_pattern else [])}
    if getattr(module.config, "num_local_experts", None) == 0:
        expected -= {"moe.router", "moe.shared.output"}
    if module.config.model_type == "falcon" and module.config.bias:
        expected = {"attn.heads", "mlp.input", "mlp.act", *RESIDUAL_LEAVES}
    if getattr(module.config, "enable_moe_block", None) is False:
        expected -= {leaf for leaf in expected if leaf.startswith("moe.")}
    assert leaves <= expected
    assert leaves - neurons == expected - neurons
    whole = {name for name in model.points if not name.startswith("layers.")}
    without_norm = {"norm.output"} if module.config.to_dict().get("do_layer_norm_before") is False else set()
    without_stream = set() if stream else {"embed.output"}
    assert whole == {*MODEL_POINTS} - {"samples", VISION} - without_norm - without_stream


def test_points_are_attributes_by_the_same_names_on_every_architecture(model: NNsight, module: Any) -> None:
    with torch.no_grad(), model.trace(IDS, use_cache=False):
        pairs = []
        if tree_of(module.config).has_stream:
            pairs.append((model.embed.output, model.points["embed.output"]))
        # Experts have no neurons in common.
        names = offered(
            model, *(f"attn.{leaf}" for leaf in ("q", "k", "v", "latent", "pattern", "heads")), "mlp.up"
        )
        for name in sorted(names, key=lambda name: int(name.split(".")[1])):
            one = getattr(*attribute(model, name))
            pairs.append((one, model.points[name]))
        if tree_of(module.config).has_stream:
            output = model.layers[-1].output  # of some models a tuple
            output = output[0] if isinstance(output, tuple) else output
            pairs.append((output, model.points["layers.-1.output"]))
        pairs.extend((one, model.points["logits"]) for one in (model.logits, model.logits.output))
        pairs = save([(one.clone(), other.clone()) for one, other in pairs])
    assert all(torch.equal(one, other) for one, other in pairs)


def test_attributes_are_assigned_like_points(model: NNsight, module: Any) -> None:
    whole = ["embed.output"] if tree_of(module.config).has_stream else []
    for name in (*offered(model, "attn.heads", "mlp.up"), *whole, "logits", "logits.output"):
        with hooked(module, name.removesuffix(".output") if name.startswith("logits") else name):
            expected = logits_of(module)
        with torch.no_grad(), model.trace(IDS, use_cache=False):
            if name == "embed.output":
                model.embed.output = moved(model.embed.output)
            elif name == "logits":
                model.logits = moved(model.logits)
            elif name == "logits.output":
                model.logits.output = moved(model.logits)
            else:
                part, leaf = attribute(model, name)
                setattr(part, leaf, moved(getattr(part, leaf)))
            found = model.output.logits.save()
        assert torch.equal(found, expected), name


# What is refused.


def test_a_point_that_the_model_has_passed_is_an_error(model: NNsight) -> None:
    for late in offered(model, "attn.heads", "attn.pattern", "mixer.output", "mlp.input"):
        with pytest.raises(OutOfOrderError), torch.no_grad(), model.trace(IDS, use_cache=False):
            _ = model.points["logits"], model.points[late]


def test_a_value_of_another_shape_is_refused(model: NNsight) -> None:
    for name in stateless(points_of_a_layer(model.points)):
        with pytest.raises(PointValueError, match="shape"), torch.no_grad(), model.trace(IDS):
            model.points[name] = torch.zeros(3)


def test_an_unknown_point_is_refused_with_those_that_there_are(model: NNsight) -> None:
    for name in ("layers.0.attn.nothing", "samples", "layers.*.output", "layers.40.output", "nonsense"):
        with pytest.raises(UnknownPointError, match=r"of a layer from 0 to 3 one of .*output"):
            model.points[name]
