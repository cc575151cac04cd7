"""Invokes that wait for each other at one place of the model."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import LanguageModel
from tests.guide.alone import tokens
from tests.hook_reference import edited, outputs_of


def patched_rows(hidden: torch.Tensor) -> torch.Tensor:
    """Give the second row the first row's values."""
    return torch.cat([hidden[:1], hidden[:1]])


def test_without_a_barrier_the_value_of_the_same_module_is_not_defined(gpt2: LanguageModel) -> None:
    with pytest.raises(NameError, match="clean_hs"), gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            clean_hs = gpt2.transformer.h[1].output[0]
        with tracer.invoke("World"):
            gpt2.transformer.h[1].output[0][:] = clean_hs


def test_with_a_barrier_the_second_invoke_has_the_value_of_the_first(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        barrier = tracer.barrier(2)

        with tracer.invoke("Hello"):
            clean_hs = gpt2.transformer.h[1].output[0]
            barrier()

        with tracer.invoke("World"):
            barrier()
            gpt2.transformer.h[1].output[0][:] = clean_hs
            output = gpt2.lm_head.output.save()

    with edited(gpt2._module, "transformer.h.1", patched_rows):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(output, expected[1:2])


def test_a_whole_output_can_be_assigned_after_a_barrier(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("Hello"):
            clean = gpt2.transformer.h[1].output
            barrier()
        with tracer.invoke("World"):
            barrier()
            gpt2.transformer.h[1].output = clean
            output = gpt2.lm_head.output.save()

    with edited(gpt2._module, "transformer.h.1", patched_rows):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(output, expected[1:2])


def test_a_barrier_holds_three_invokes_and_can_be_used_again(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        barrier = tracer.barrier(3)
        with tracer.invoke("Hello"):
            first = gpt2.transformer.h[0].output
            barrier()
            third = gpt2.transformer.h[2].output
            barrier()
        with tracer.invoke("World"):
            barrier()
            gpt2.transformer.h[0].output = first
            barrier()
            gpt2.transformer.h[2].output = third
            out1 = gpt2.lm_head.output.save()
        with tracer.invoke("Tower"):
            barrier()
            barrier()
            gpt2.transformer.h[2].output = third * 2
            out2 = gpt2.lm_head.output.save()

    def rows(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:1], hidden[:1], hidden[:1] * 2])

    with edited(gpt2._module, "transformer.h.2", rows):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World", "Tower"), "lm_head")
    assert torch.equal(torch.cat([out1, out2]), expected[1:])
