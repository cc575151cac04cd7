"""Scripts of before, in which a block's output was a tuple: ``output[0]`` is warned about, once per place."""

from __future__ import annotations

import linecache
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight, save
from nnsight_engine.compat import install, uninstall
from tests.small_models import tiny_gpt2, tiny_llama

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
WARNED = [
    "save(block.output[0])  # here",
    "block.output[0].save()  # here",
    "block.output.save()[0]  # here",
    "save(block.output[0][:, -1])  # here",
    "block.output[0][:] = 0  # here",
    "block.output[0] += 1  # here",
    "block.output[0] = torch.zeros(3, 8)  # here",
    "hidden = block.output\nhidden = hidden * 1 if hidden.ndim == 0 else hidden\nsave(hidden[0])  # here",
    "value = block.output.clone().save()\nvalue[0].sum()  # here",
    "hidden, *_ = block.output  # here\nsave(hidden)",
]
NOT_WARNED = [
    "save(block.output)",
    "save(block.output[:, 0])",
    "save(block.output[1])",
    "block.output[:1] = 0",
    "hidden = block.output\nsizes = [hidden.shape]\nsave(sizes[0])\nsave(hidden.shape[0])",
    "save((block.attn if hasattr(block, 'attn') else block.self_attn).output[0])",
]


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


Traced = Callable[[str], list[warnings.WarningMessage]]


@pytest.fixture
def traced(model: Any, block: Any, tmp_path: Path) -> Traced:
    """Return a function that runs code in a function, in two traces, and returns the warnings."""

    def run(code: str) -> list[warnings.WarningMessage]:
        script = tmp_path / "script.py"
        script.write_text(f"def script(block):\n{textwrap.indent(code, '    ')}\n")
        names: dict[str, Any] = {"save": save, "torch": torch}
        exec(compile(script.read_text(), str(script), "exec"), names)
        run_it = names["script"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                with model.trace(TOKENS):
                    run_it(block)
        return caught

    return run


@pytest.mark.parametrize("code", WARNED)
def test_the_first_item_of_a_blocks_output_is_warned_about_once(
    block: Any, traced: Traced, code: str
) -> None:
    (warning,) = traced(code)
    assert f"`output[0]` of {block.path} is its first row" in str(warning.message)
    assert "Write `output`" in str(warning.message)
    assert linecache.getline(warning.filename, warning.lineno).rstrip().endswith("# here")


@pytest.mark.parametrize("code", NOT_WARNED)
def test_other_indexing_is_not_warned_about(traced: Traced, code: str) -> None:
    assert traced(code) == []


def test_there_are_no_warnings_outside_of_compat(traced: Traced) -> None:
    uninstall()
    assert traced(WARNED[0]) == []


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
