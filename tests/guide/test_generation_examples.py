"""Steps by number, slice and list, one by one, and what follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError

from nnsight_engine import LanguageModel, save
from tests.guide.alone import module_of
from tests.hook_reference import edited, recorded

TEXT = "Hello"
FIRST, LAST = "transformer.h.0", "transformer.h.3"


def exactly(num_tokens: int) -> dict[str, int]:
    """Ask for this many tokens: random models end a text when they please."""
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}


def plain_run(
    model: LanguageModel, num_tokens: int, path: str = LAST, *, zeroed: range | None = range(0)
) -> tuple[torch.Tensor, list[Any]]:
    """Generate with torch hooks only.

    Args:
        model: Whose module generates.
        num_tokens: How many tokens.
        path: Whose outputs to return.
        zeroed: Steps in which the first block's output is zeroed; None for all.

    Returns:
        The tokens, and what the module at ``path`` gave in each step.
    """
    plain: Any = module_of(model)
    inputs = model.tokenizer(TEXT, return_tensors="pt")
    with recorded(plain, path) as outputs, edited(plain, FIRST, torch.zeros_like, calls=zeroed):
        tokens = plain.generate(**inputs, **exactly(num_tokens))
    return tokens, outputs[path]


def test_the_generated_output_is_decoded(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(5)) as tracer:
        hidden_states = gpt2.transformer.h[-1].output.save()
        output = gpt2.generator.output.save()
        result = tracer.result.save()
    tokens, hidden = plain_run(gpt2, 5)
    assert torch.equal(output, tokens)
    assert torch.equal(result, tokens)
    assert torch.equal(hidden_states, hidden[0])  # outside a loop a request is for the first step
    decoded = gpt2.tokenizer.decode(output[0])
    assert decoded.startswith(TEXT)


def test_a_slice_without_bounds_visits_every_step(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(5)) as tracer:
        logits = save([])
        for _step in tracer.iter[:]:
            logits.append(gpt2.lm_head.output[0][-1].argmax(dim=-1))
    tokens, _ = plain_run(gpt2, 5)
    assert [int(token) for token in logits] == tokens[0, -5:].tolist()


def test_a_slice_visits_the_steps_within_it(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(5)) as tracer:
        logits = save([])
        steps = save([])
        for step in tracer.iter[1:3]:
            steps.append(step)
            logits.append(gpt2.lm_head.output)
    _, expected = plain_run(gpt2, 5, "lm_head")
    assert steps == [1, 2]
    assert all(torch.equal(own, plain) for own, plain in zip(logits, expected[1:3], strict=True))


def test_a_number_visits_one_step(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(5)) as tracer:
        for _step in tracer.iter[0]:
            first_logits = gpt2.lm_head.output.save()
    with gpt2.generate(TEXT, **exactly(5)) as tracer:
        for _step in tracer.iter[2]:
            third_logits = gpt2.lm_head.output.save()
    _, expected = plain_run(gpt2, 5, "lm_head")
    assert torch.equal(first_logits, expected[0])
    assert torch.equal(third_logits, expected[2])


def test_a_list_visits_the_steps_in_it(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(5)) as tracer:
        logits = save([])
        for _step in tracer.iter[[0, 2, 4]]:
            logits.append(gpt2.lm_head.output)
    _, expected = plain_run(gpt2, 5, "lm_head")
    assert all(torch.equal(own, plain) for own, plain in zip(logits, expected[::2], strict=True))


def test_one_step_alone_can_be_intervened_on(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(5)) as tracer:
        outputs = save([])
        for step_idx in tracer.iter[:]:
            if step_idx == 2:
                gpt2.transformer.h[0].output[:] = 0
            outputs.append(gpt2.transformer.h[-1].output)
        tokens = gpt2.generator.output.save()
    expected_tokens, expected = plain_run(gpt2, 5, zeroed=range(2, 3))
    _, untouched = plain_run(gpt2, 5)
    assert torch.equal(tokens, expected_tokens)
    assert all(torch.equal(own, plain) for own, plain in zip(outputs, expected, strict=True))
    assert not torch.equal(outputs[2], untouched[2])


def test_all_applies_to_every_step(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(3)) as tracer:
        hidden_states = save([])
        for _step in tracer.all():
            gpt2.transformer.h[0].output[:] = 0
            hidden_states.append(gpt2.transformer.h[-1].output)
        tokens = tracer.result.save()
    expected_tokens, expected = plain_run(gpt2, 3, zeroed=None)
    assert torch.equal(tokens, expected_tokens)
    assert all(torch.equal(own, plain) for own, plain in zip(hidden_states, expected, strict=True))


def test_next_moves_on_by_one_step(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(3)):
        hs1 = gpt2.transformer.h[-1].output.save()
        hs2 = gpt2.transformer.h[-1].next().output.save()
        hs3 = gpt2.transformer.h[-1].next().output.save()
    _, expected = plain_run(gpt2, 3)
    assert all(torch.equal(own, plain) for own, plain in zip((hs1, hs2, hs3), expected, strict=True))


def test_the_tracers_next_moves_on_too(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(3)) as tracer:
        first = gpt2.lm_head.output.save()
        tracer.next()
        second = gpt2.lm_head.output.save()
    _, expected = plain_run(gpt2, 3, "lm_head")
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_code_after_a_loop_without_bounds_runs_once_generation_is_over(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(3)) as tracer:
        num_steps = 0
        for _step in tracer.iter[:]:
            hidden = gpt2.transformer.h[-1].output.save()
            num_steps += 1
        num_steps = save(num_steps)
        final_tokens = gpt2.generator.output.save()
    tokens, expected = plain_run(gpt2, 3)
    assert num_steps == 3
    assert torch.equal(hidden, expected[-1])
    assert torch.equal(final_tokens, tokens)


def test_a_value_that_can_no_longer_come_after_a_loop_is_an_error_that_names_it(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match=r"model\.output"),
        gpt2.generate(TEXT, **exactly(3)) as tracer,
    ):
        for _step in tracer.iter[:]:
            gpt2.transformer.h[-1].output.save()
        gpt2.output.save()


def test_an_empty_invoke_reads_beside_a_loop_without_bounds(gpt2: LanguageModel) -> None:
    with gpt2.generate(**exactly(3)) as tracer:
        with tracer.invoke(TEXT):
            for _step in tracer.iter[:]:
                hidden = gpt2.transformer.h[-1].output.save()
        with tracer.invoke():
            final_logits = gpt2.output.logits.save()
    _, expected = plain_run(gpt2, 3)
    _, logits = plain_run(gpt2, 3, "lm_head")
    assert torch.equal(hidden, expected[-1])
    assert torch.equal(final_logits, logits[0])


def test_a_loop_with_bounds_goes_on_below_before_generation_is_over(gpt2: LanguageModel) -> None:
    with gpt2.generate(TEXT, **exactly(4)) as tracer:
        for _step in tracer.iter[:2]:
            hidden = gpt2.transformer.h[-1].output.save()
        tracer.next()
        third = gpt2.transformer.h[-1].output.save()
    _, expected = plain_run(gpt2, 4)
    assert torch.equal(hidden, expected[1])
    assert torch.equal(third, expected[2])


def test_a_step_that_was_named_and_does_not_come_is_an_error(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match="step 5 was not reached"),
        gpt2.generate(TEXT, **exactly(3)) as tracer,
    ):
        for _step in tracer.iter[5]:
            gpt2.lm_head.output.save()
