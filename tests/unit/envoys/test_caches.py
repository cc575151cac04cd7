"""Caches read as scripts do: values of each step, places by any name of the model, inputs beside outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight
from nnsight_engine.core.read_listener import ReadListener
from nnsight_engine.envoys.cache import Cache, CacheView, Entry
from tests.small_models import tiny_gpt2

TOKENS = torch.tensor([[1, 2, 3]])


@pytest.fixture(scope="module")
def gpt2() -> NNsight:
    rename = {"transformer.h": "blocks", "mlp": "feed", ".transformer": ["body", "backbone"]}
    return NNsight(tiny_gpt2(), rename=rename)


GENERATION: dict[str, Any] = {
    "max_new_tokens": 3,
    "min_new_tokens": 3,
    "do_sample": False,
    "pad_token_id": 0,
}


class Cell(torch.nn.Module):
    """Has a part that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.part(x))


class Loop(torch.nn.Module):
    """Calls one module again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.parts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.cell(x)
        return torch.as_tensor(self.parts(x))


def test_an_entry_is_the_list_of_its_steps(gpt2: NNsight) -> None:
    with gpt2.generate(TOKENS, **GENERATION) as tracer:
        cache = tracer.cache()
        logits: list[torch.Tensor] = [].save()  # type: ignore[attr-defined] # mounted in traces
        for _ in tracer.iter[:]:
            logits.append(gpt2.lm_head.output)  # noqa: PERF401 - as people write it
    for entry in (cache["model.lm_head"], cache.model.lm_head):
        assert len(entry) == 3
        assert all(torch.equal(entry[step].output, logits[step]) for step in range(3))
        assert torch.equal(entry[-1].output, logits[2])
        assert all(map(torch.equal, [step.output for step in entry], logits))
        assert all(map(torch.equal, [step.output for step in entry[1:]], logits[1:]))
        assert all(map(torch.equal, entry.output, logits))
        assert [tuple(step.input.shape) for step in entry] == [tuple(one.shape) for one in entry.input]
        with pytest.raises(IndexError, match=r"3 calls of model\.lm_head, got 3"):
            entry[3]


def test_an_entry_of_one_call_has_one_step(gpt2: NNsight) -> None:
    with gpt2.trace(TOKENS) as tracer:
        cache = tracer.cache()
    entry = cache["model.transformer.h.1.mlp"]  # has inputs and outputs by default
    assert torch.equal(entry.output, gpt2.transformer.h[1].mlp._module(entry.input))
    assert entry.inputs[0][0] is entry.input
    assert len(cache["model.lm_head"]) == 1
    assert torch.equal(cache["model.lm_head"][0].output, cache["model.lm_head"].output)
    assert len(cache["model.lm_head"][0]) == 1


def test_steps_pair_inputs_with_their_own_outputs() -> None:
    model = NNsight(Loop())
    with model.trace(torch.ones(1, 2)) as tracer:
        model.cell.part.input.save()  # the input of the first call of the cell has passed
        cache = tracer.cache()
        outputs = [].save()  # type: ignore[attr-defined] # mounted in traces
        for call in range(3):
            if call:
                model.cell.next()
            outputs.append(model.cell.output)
    first, *others = cache["model.cell"]
    with pytest.raises(AttributeError, match="include_inputs"):
        first.input  # noqa: B018 - reading it is the test
    assert torch.equal(first.output, outputs[0])
    for call, step in enumerate(others, start=1):
        assert torch.equal(step.input, outputs[call - 1])
        assert torch.equal(step.output, outputs[call])


@pytest.mark.parametrize(
    "path",
    [
        "model.transformer.h.0.mlp",
        "model.blocks.0.mlp",
        "model.blocks.0.feed",
        "model.body.h.0.feed",
        "model.backbone.h.0.mlp",
    ],
)
def test_a_place_is_found_by_any_name_of_the_model(gpt2: NNsight, path: str) -> None:
    with gpt2.trace(TOKENS) as tracer:
        cache = tracer.cache(modules=[gpt2.transformer.h[0].mlp])
        expected = gpt2.transformer.h[0].mlp.output.save()
    here = cache
    for part in path.split("."):
        here = here[int(part)] if part.isdecimal() else getattr(here, part)
    assert torch.equal(here.output, expected)
    assert torch.equal(cache[path].output, expected)
    assert path in cache
    assert path.replace("0", "1") not in cache
    assert list(cache) == ["model.transformer.h.0.mlp"]


def test_places_lead_on_to_what_is_below_them(gpt2: NNsight) -> None:
    with gpt2.trace(TOKENS) as tracer:
        cache = tracer.cache()
    mlp = cache["model.transformer.h.1.mlp"].output
    assert torch.equal(cache["model.transformer.h.1"].mlp.output, mlp)
    assert torch.equal(cache["model.transformer.h"][1].feed.output, mlp)
    assert torch.equal(cache["model"].blocks[-1]["mlp"].output, mlp)
    assert torch.equal(cache.model.transformer.h[0:2][1].mlp.output, mlp)


@pytest.mark.parametrize("key", ["h.0", "h.0.feed", "h.1.feed.c_fc", "model.transformer.h.0"])
def test_a_view_takes_the_paths_below_it(gpt2: NNsight, key: str) -> None:
    with torch.no_grad(), gpt2.trace(TOKENS) as tracer:
        cache = tracer.cache()
    envoy = gpt2.transformer.get(key)
    assert cache.model.transformer[key] == cache[envoy.path]
    assert torch.is_tensor(cache.model.transformer.h.get(key.removeprefix("h."), cache[envoy.path]).output)
    with pytest.raises(KeyError, match="nowhere"):
        _ = cache.model.transformer["h.0.nowhere"]


@pytest.mark.parametrize("kept", ["output", "input"])
def test_a_value_that_was_not_stored_is_none_in_compat_and_an_error_else(
    gpt2: NNsight, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"include_output": kept == "output", "include_inputs": kept == "input"}
    with torch.no_grad(), gpt2.trace(TOKENS) as tracer:
        cache = tracer.cache(modules=[gpt2.lm_head], **options)
    entry = cache["model.lm_head"]
    missing = ["inputs", "input"] if kept == "output" else ["output"]
    for name in missing:
        with pytest.raises(AttributeError, match="store"):
            getattr(entry, name)
    monkeypatch.setattr(ReadListener, "missing_is_none", True)
    assert [getattr(entry, name) for name in missing] == [None] * len(missing)
    assert getattr(entry, kept) is not None


def test_a_list_of_modules_is_the_list_of_those(gpt2: NNsight) -> None:
    with gpt2.trace(TOKENS) as tracer:
        cache = tracer.cache()
    blocks = cache.model.transformer.h
    assert len(blocks) == len(list(blocks)) == 2
    assert torch.equal(next(iter(blocks)).output, cache["model.transformer.h.0"].output)
    assert "model.transformer.h" not in cache
    assert "model.transformer.h.1.mlp" in blocks.keys()  # noqa: SIM118 - iteration is over the modules
    assert len(cache) == len(cache.keys()) == len(list(cache))


def test_a_sequence_is_its_modules_and_has_its_own_output() -> None:
    model = NNsight(Loop())
    with model.trace(torch.ones(1, 2)) as tracer:
        cache = tracer.cache()
        result = tracer.result.save()
    assert torch.equal(cache.model.parts.output, result)
    assert torch.equal(cache.model.parts[0].output, cache["model.parts.0"].output)
    assert len(cache.model.parts) == 2


@pytest.mark.parametrize(
    "path", ["model.nothing", "nothing", "model.transformer.h.7", "model.lm_head.weight"]
)
def test_a_path_that_is_not_there_is_a_key_error(gpt2: NNsight, path: str) -> None:
    with gpt2.trace(TOKENS) as tracer:
        cache = tracer.cache(modules=[gpt2.lm_head])
    assert path not in cache
    with pytest.raises(KeyError, match=r"not in the cache, which has model\.lm_head"):
        cache[path]


class Number(int):
    """The number of a call; says how often any was compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Number.compared += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        Number.compared += 1
        return int(self) < int(other)


def test_going_through_many_calls_takes_time_in_proportion() -> None:
    count = 500
    entry = Entry()
    for number in range(count):
        entry.add("input", Number(number), ((number,), {}))
        entry.add("output", Number(number), number)
    cache = Cache()
    cache.entries["model.lm_head"] = entry
    view = CacheView(cache, "model.lm_head", None)
    Number.compared = 0
    assert [one.output for one in view] == list(range(count))
    assert [view[at].input for at in range(count)] == list(range(count))
    assert Number.compared <= 20 * count
    entry.add("output", Number(count), count)
    assert (len(view), view[-1].output) == (count + 1, count)


def test_an_entry_travels_as_its_values_and_their_numbers() -> None:
    entry = Entry()
    entry.add("output", 1, "b")
    assert entry.output == "b"
    copied = copy.copy(entry)
    assert vars(copied) == {"values": {"output": ["b"]}, "numbers": {"output": [1]}}
    assert copied.output == "b"
