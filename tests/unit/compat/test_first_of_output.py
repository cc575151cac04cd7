"""Scripts of before, in which a block's output was a tuple: ``output[0]`` is warned about, once per place."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight, save
from nnsight_engine.compat import install, uninstall
from tests.small_models import tiny_gpt2, tiny_llama

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(autouse=True)
def _as_a_script_of_nnsight() -> Iterator[None]:
    install(force=True)
    yield
    uninstall()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return NNsight(tiny_gpt2() if request.param == "gpt2" else tiny_llama())


@pytest.fixture(scope="module")
def block(model: Any) -> Any:
    """The second block of the model."""
    return model.transformer.h[1] if hasattr(model, "transformer") else model.model.layers[1]


def indexed(block: Any) -> None:
    save(block.output[0])  # here


def saved(block: Any) -> None:
    block.output[0].save()  # here


def saved_before(block: Any) -> None:
    block.output.save()[0]  # here


def sliced_further(block: Any) -> None:
    save(block.output[0][:, -1])  # here


def zeroed(block: Any) -> None:
    block.output[0][:] = 0  # here


def added(block: Any) -> None:
    block.output[0] += 1  # here


def assigned(block: Any) -> None:
    block.output[0] = torch.zeros(3, 8)  # here


def named(block: Any) -> None:
    hidden = block.output
    hidden = hidden * 1 if hidden.ndim == 0 else hidden
    save(hidden[0])  # here


def named_and_saved(block: Any) -> None:
    value = block.output.clone().save()
    value[0].sum()  # here


def unpacked(block: Any) -> None:
    hidden, *_ = block.output  # here
    save(hidden)


def whole(block: Any) -> None:
    save(block.output)


def last_token(block: Any) -> None:
    save(block.output[:, 0])


def other_row(block: Any) -> None:
    save(block.output[1])


def first_row_kept_apart(block: Any) -> None:
    block.output[:1] = 0


def first_of_something_else(block: Any) -> None:
    hidden = block.output
    sizes = [hidden.shape]
    save(sizes[0])
    save(hidden.shape[0])


def attention(block: Any) -> None:
    save((block.attn if hasattr(block, "attn") else block.self_attn).output[0])


def traced(model: Any, block: Any, script: Callable[[Any], None]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            with model.trace(TOKENS):
                script(block)
    return caught


@pytest.mark.parametrize(
    "script",
    [indexed, saved, saved_before, sliced_further, zeroed, added, assigned, named, named_and_saved, unpacked],
)
def test_the_first_item_of_a_blocks_output_is_warned_about_once(
    model: Any, block: Any, script: Callable[[Any], None]
) -> None:
    script.__globals__.pop("__warningregistry__", None)
    (warning,) = traced(model, block, script)
    assert f"`output[0]` of {block.path} is its first row" in str(warning.message)
    assert "Write `output`" in str(warning.message)
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).rstrip().endswith("# here")


@pytest.mark.parametrize(
    "script", [whole, last_token, other_row, first_row_kept_apart, first_of_something_else, attention]
)
def test_other_indexing_is_not_warned_about(model: Any, block: Any, script: Callable[[Any], None]) -> None:
    assert traced(model, block, script) == []


def test_blocks_of_traces_are_looked_at_as_functions_are(model: Any, block: Any) -> None:
    globals().pop("__warningregistry__", None)
    with pytest.warns(UserWarning, match="is its first row"), model.trace(TOKENS):
        first = block.output[0].save()
    assert first.shape == (3, 8)  # the plain meaning


def test_indexing_after_the_trace_is_warned_about_there(model: Any, block: Any) -> None:
    globals().pop("__warningregistry__", None)
    with pytest.warns(UserWarning, match="is its first row") as caught, model.trace(TOKENS):
        outcome = block.output.save()
    assert outcome[0].shape == (3, 8)  # here
    assert linecache.getline(__file__, caught[0].lineno).rstrip().endswith("# here")


def test_there_are_no_warnings_outside_of_compat(model: Any, block: Any) -> None:
    uninstall()
    assert traced(model, block, indexed) == []
