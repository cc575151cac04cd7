"""Traces at a script's top level, where variables are the module's."""

from __future__ import annotations

import functools
import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel
from tests.guide.alone import module_of, tokens
from tests.hook_reference import edited, outputs_of

Script = Callable[[str], dict[str, Any]]


def run_script(model: LanguageModel, folder: Path, text: str) -> dict[str, Any]:
    """Run text as the file of a program, with ``model`` in it, and return its variables."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return runpy.run_path(str(path), {"model": model})


@pytest.fixture
def script(gpt2: LanguageModel, tmp_path: Path) -> Script:
    """Runs scripts on the tiny GPT-2."""
    return functools.partial(run_script, gpt2, tmp_path)


def test_saved_values_are_variables_of_the_script_and_others_are_not(
    script: Script, gpt2: LanguageModel
) -> None:
    variables = script("""
        with model.trace("Hello"):
            lost = model.transformer.h[0].output
            model.transformer.h[1].output[:] = 0
            hidden_states = model.transformer.h[-1].output.save()
        shape = hidden_states.shape
    """)
    with edited(gpt2._module, "transformer.h.1", torch.zeros_like):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.3")
    assert torch.equal(variables["hidden_states"], expected)
    assert variables["shape"] == expected.shape
    assert "lost" not in variables


def test_functions_and_variables_of_the_script_are_used_in_blocks(
    script: Script, gpt2: LanguageModel
) -> None:
    variables = script("""
        import nnsight_engine
        import torch

        scale = 2.0
        scales: list[float] = []

        def rescaled(hidden):
            scales.append(scale)
            return hidden * scale

        with model.trace("Hello"):
            scales = nnsight_engine.save(scales)
            model.transformer.wte.output = rescaled(model.transformer.wte.output)
            logits: torch.Tensor = model.lm_head.output.save()
    """)
    assert variables["scales"] == [2.0]
    with edited(gpt2._module, "transformer.wte", lambda embeds: embeds * 2):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "lm_head")
    assert torch.equal(variables["logits"], expected)


def test_invokes_share_the_scripts_variables(script: Script, gpt2: LanguageModel) -> None:
    variables = script("""
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke("Hello"):
                clean_hs = model.transformer.h[2].output[:, -1, :]
                barrier()
            with tracer.invoke("World"):
                barrier()
                model.transformer.h[2].output[:, -1, :] = clean_hs
                logits = model.lm_head.output.save()
            with tracer.invoke():
                everything = model.lm_head.output.save()
    """)

    def patched(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[1, -1] = hidden[0, -1]
        return hidden

    with edited(gpt2._module, "transformer.h.2", patched):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(variables["logits"], expected[1:])
    assert torch.equal(variables["everything"], expected)


def test_gradients_are_read_at_the_top_level_too(local_gpt2: LanguageModel, tmp_path: Path) -> None:
    text = """
        with model.trace("Hello"):
            hs = model.transformer.h[-1].output
            loss = model.lm_head.output.sum()
            with loss.backward():
                grad = hs.grad.save()

        with model.trace("Hello"):
            hs = model.transformer.h[-1].output.save()
            logits = model.lm_head.output.save()
        with logits.sum().backward():
            later = hs.grad.save()
    """
    variables = run_script(local_gpt2, tmp_path, text)
    module_of(local_gpt2).zero_grad(set_to_none=True)
    assert torch.equal(variables["grad"], variables["later"])
    assert variables["grad"].shape == variables["hs"].shape


def test_a_loop_around_a_trace_sees_the_loops_variable(script: Script, gpt2: LanguageModel) -> None:
    variables = script("""
        kept = []
        for index, layer in enumerate(model.transformer.h):
            with model.trace("Hello"):
                hidden = layer.output.save()
            kept.append((index, hidden))
    """)
    paths = [f"transformer.h.{index}" for index in range(4)]
    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), *paths)
    assert [index for index, _ in variables["kept"]] == [0, 1, 2, 3]
    assert all(torch.equal(own, plain) for (_, own), plain in zip(variables["kept"], expected, strict=True))
