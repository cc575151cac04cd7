"""The same modules once per generated token."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError

from nnsight_engine import LanguageModel, save
from tests.guide.alone import generated
from tests.hook_reference import edited, recorded

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


def test_next_beyond_the_last_step_is_a_warning_that_names_the_value(gpt2: LanguageModel, where: str) -> None:
    # The document's own example asks for step 3 of 3 tokens, whose steps are 0, 1 and 2.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gpt2.generate("Hello", max_new_tokens=3) as tracer:
            first = gpt2.lm_head.output.save()
            tracer.next()
            gpt2.lm_head.output.save()
            tracer.next(2)
            gpt2.lm_head.output.save()  # the line
            first = save(first * 0)  # not reached
    assert torch.equal(first, steps_of(gpt2, "lm_head", 3)[0])
    if where == "local":  # elsewhere it is printed there, as LOG
        ((message, filename, line),) = [(str(one.message), one.filename, one.lineno) for one in caught]
        assert "`model.lm_head.output.i3` was not provided. It was reached 3 times" in message
        assert "there are no further steps" in message
        assert filename == __file__
        assert linecache.getline(filename, line).endswith("# the line\n")


def test_a_modules_next_beyond_the_last_step_is_a_warning_too(gpt2: LanguageModel, where: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gpt2.trace("Hello"):
            first = gpt2.lm_head.output[:, -1].save()
            gpt2.lm_head.next().output.save()
    torch.testing.assert_close(first, steps_of(gpt2, "lm_head", 1)[0][:, -1])
    if where == "local":
        assert ["It was reached once" in str(one.message) for one in caught] == [True]


@pytest.mark.parametrize("stop", [3, 9, None])
def test_a_request_after_a_loop_says_that_generation_has_ended(gpt2: LanguageModel, stop: int | None) -> None:
    with (
        pytest.raises(MissedProviderError) as caught,
        gpt2.generate("Hello", max_new_tokens=3) as tracer,
    ):
        for _ in tracer.iter[:stop]:
            gpt2.transformer.h[-1].output.save()
        gpt2.transformer.h[0].output.save()
    message = str(caught.value)
    assert "`model.transformer.h.0.output.i3` was not provided" in message
    assert "generation, has ended" in message
    for way in ("if step == 2:", "with tracer.invoke():", "tracer.result"):
        assert way in message


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
