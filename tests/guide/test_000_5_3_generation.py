"""The design document, section 5.3: the same modules once per generated token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.intervention.interleaver import MissedProviderError
from tests.guide.alone import generated
from tests.guide.plain import edited, recorded

NUM_TOKENS = 5
LAST = "transformer.h.3"


def steps_of(model: LanguageModel, path: str, num_tokens: int = NUM_TOKENS) -> list[Any]:
    """Return what a module gives in each step of generation."""
    with recorded(model._module, path) as plain:
        generated(model, "Hello", max_new_tokens=num_tokens)
    return plain[path]


def test_without_a_cursor_the_first_call_is_meant(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=NUM_TOKENS):
        hidden = gpt2.transformer.h[0].output.save()
    assert torch.equal(hidden, steps_of(gpt2, "transformer.h.0")[0])


def test_iter_of_everything_runs_for_every_step(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=NUM_TOKENS) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(gpt2.lm_head.output.save())
    expected = steps_of(gpt2, "lm_head")
    assert len(logits) == len(expected) == NUM_TOKENS
    assert all(map(torch.equal, logits, expected))


@pytest.mark.parametrize(
    ("steps", "meant"),
    [
        (2, [2]),
        (slice(None), [0, 1, 2, 3, 4]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(3, None), [3, 4]),
        ([0, 3], [0, 3]),
    ],
)
def test_iter_takes_a_step_or_a_slice(gpt2: LanguageModel, steps: Any, meant: list[int]) -> None:
    with gpt2.generate("Hello", max_new_tokens=NUM_TOKENS) as tracer:
        visited, values = save([]), save([])
        for step in tracer.iter[steps]:
            visited.append(step)
            values.append(gpt2.lm_head.output)
    expected = steps_of(gpt2, "lm_head")
    assert visited == meant
    assert all(map(torch.equal, values, [expected[step] for step in meant]))


def test_all_is_iter_of_everything(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=NUM_TOKENS) as tracer:
        for _ in tracer.all():
            gpt2.transformer.h[0].output[0][:] = 0
    with gpt2.generate("Hello", max_new_tokens=NUM_TOKENS) as tracer:
        for _ in tracer.all():
            gpt2.transformer.h[0].output[0][:] = 0
        tokens = tracer.result.save()
    with edited(gpt2._module, "transformer.h.0", torch.zeros_like):
        expected = generated(gpt2, "Hello", max_new_tokens=NUM_TOKENS)
    assert torch.equal(tokens, expected)


def test_next_moves_the_cursor(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=4) as tracer:
        out0 = gpt2.lm_head.output.save()
        tracer.next()
        out1 = gpt2.lm_head.output.save()
        tracer.next(2)
        out3 = gpt2.lm_head.output.save()
    expected = steps_of(gpt2, "lm_head", 4)
    assert torch.equal(out0, expected[0])
    assert torch.equal(out1, expected[1])
    assert torch.equal(out3, expected[3])


def test_next_beyond_the_last_step_is_an_error_that_names_the_value(gpt2: LanguageModel) -> None:
    # The document's own example asks for step 3 of 3 tokens, whose steps are 0, 1 and 2.
    with (
        pytest.raises(MissedProviderError, match=r"`model\.lm_head\.output\.i3` was not provided"),
        gpt2.generate("Hello", max_new_tokens=3) as tracer,
    ):
        gpt2.lm_head.output.save()
        tracer.next()
        gpt2.lm_head.output.save()
        tracer.next(2)
        gpt2.lm_head.output.save()


def test_an_intervention_in_one_step_only(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=NUM_TOKENS) as tracer:
        for step in tracer.iter[:]:
            if step == 2:
                gpt2.transformer.h[0].output[0][:] = 0
        tokens = tracer.result.save()
    with edited(gpt2._module, "transformer.h.0", torch.zeros_like, calls=range(2, 3)):
        expected = generated(gpt2, "Hello", max_new_tokens=NUM_TOKENS)
    assert torch.equal(tokens, expected)
    assert not torch.equal(tokens, generated(gpt2, "Hello", max_new_tokens=NUM_TOKENS))


# The document's footgun: code after an unbounded loop never runs. Here it does.


def test_code_after_an_unbounded_loop_runs_once_generation_is_over(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=3) as tracer:
        for _ in tracer.iter[:]:
            hidden = gpt2.transformer.h[-1].output.save()
        after = save("generation is over")
        tokens = tracer.result.save()
    assert torch.equal(hidden, steps_of(gpt2, LAST, 3)[-1])
    assert after == "generation is over"
    assert torch.equal(tokens, generated(gpt2, "Hello", max_new_tokens=3))


def test_a_value_that_can_no_longer_come_is_an_error_that_names_it(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match=r"model\.output\.i") as caught,
        gpt2.generate("Hello", max_new_tokens=3) as tracer,
    ):
        for _ in tracer.iter[:]:
            hidden = gpt2.transformer.h[-1].output.save()
        gpt2.output.save()
    assert str(caught.traceback[-1].path) == __file__
    assert "gpt2.output.save()" in str(caught.traceback[-1].statement)
    assert torch.equal(hidden, steps_of(gpt2, LAST, 3)[-1])  # saved before the error, and given back


def test_a_separate_empty_invoke_has_a_cursor_of_its_own(gpt2: LanguageModel) -> None:
    with gpt2.generate(max_new_tokens=3) as tracer:
        with tracer.invoke("Hello"):
            for _ in tracer.iter[:]:
                hidden = gpt2.transformer.h[-1].output.save()
        with tracer.invoke():
            final_logits = gpt2.output.logits.save()
    assert torch.equal(hidden, steps_of(gpt2, LAST, 3)[-1])
    assert torch.equal(final_logits, steps_of(gpt2, "lm_head", 3)[0])


def test_a_bounded_loop_is_left_and_a_later_step_can_be_asked_for(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=3) as tracer:
        for _ in tracer.iter[:3]:
            hidden = gpt2.transformer.h[-1].output.save()
        final_logits = gpt2.output.logits.save()
    assert torch.equal(hidden, steps_of(gpt2, LAST, 3)[2])
    # After a loop, the next call to come is meant; the model is in its third, whose output comes next.
    assert torch.equal(final_logits, steps_of(gpt2, "lm_head", 3)[2])


def test_next_in_a_plain_loop_gives_explicit_control(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=4) as tracer:
        values = save([])
        for _ in range(3):
            values.append(gpt2.transformer.h[-1].output)
            tracer.next()
        final_logits = gpt2.output.logits.save()
    assert all(map(torch.equal, values, steps_of(gpt2, LAST, 4)))
    assert torch.equal(final_logits, steps_of(gpt2, "lm_head", 4)[3])
