"""The same modules once per generated token: loops over steps, one step at a time, and what follows."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.interleaving.events import MissedProviderError
from tests.guide.alone import generated
from tests.hook_reference import edited, recorded

NUM_TOKENS = 5
LAST = "transformer.h.3"


def exactly(num_tokens: int) -> dict[str, int]:
    """Ask for this many tokens: random models end a text when they please."""
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}


def steps_of(model: LanguageModel, path: str, num_tokens: int = NUM_TOKENS) -> list[Any]:
    """Return what a module gives in each step of generation."""
    with recorded(model._module, path) as plain:
        generated(model, "Hello", **exactly(num_tokens))
    return plain[path]


def test_generation_gives_the_tokens_of_transformers_and_without_a_cursor_the_first_step(
    gpt2: LanguageModel,
) -> None:
    with gpt2.generate("Hello", **exactly(NUM_TOKENS)) as tracer:
        hidden = gpt2.transformer.h[0].output.save()
        output = gpt2.generator.output.save()
        result = tracer.result.save()
    expected = generated(gpt2, "Hello", **exactly(NUM_TOKENS))
    assert torch.equal(output, expected)
    assert torch.equal(result, expected)
    assert torch.equal(hidden, steps_of(gpt2, "transformer.h.0")[0])
    assert gpt2.tokenizer.decode(output[0]).startswith("Hello")


def test_options_of_generation_go_on_to_transformers(local_gpt2: LanguageModel) -> None:
    options = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.7, "top_k": 5}
    torch.manual_seed(0)
    with local_gpt2.generate("Hello", **options) as tracer:
        output = tracer.result.save()
    torch.manual_seed(0)
    assert torch.equal(output, generated(local_gpt2, "Hello", **options))


def test_several_prompts_are_generated_from_together(gpt2: LanguageModel) -> None:
    with gpt2.generate(**exactly(3)) as tracer:
        with tracer.invoke("Hello"):
            tokens = save([])
            for _ in tracer.iter[:3]:
                tokens.append(gpt2.generator.streamer.output.item())
            first = tracer.result.save()
        with tracer.invoke("World"):
            second = tracer.result.save()
    assert torch.equal(first, generated(gpt2, "Hello", **exactly(3)))
    assert torch.equal(second, generated(gpt2, "World", **exactly(3)))
    assert tokens == first[0, -3:].tolist()


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
def test_iter_takes_a_step_a_slice_or_a_list(gpt2: LanguageModel, steps: Any, meant: list[int]) -> None:
    with gpt2.generate("Hello", **exactly(NUM_TOKENS)) as tracer:
        visited, values = save([]), save([])
        for step in tracer.iter[steps]:
            visited.append(step)
            values.append(gpt2.lm_head.output)
    expected = steps_of(gpt2, "lm_head")
    assert visited == meant
    assert len(values) == len(meant)
    assert all(map(torch.equal, values, [expected[step] for step in meant]))


def test_all_is_iter_of_everything(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", **exactly(NUM_TOKENS)) as tracer:
        hidden_states = save([])
        for _ in tracer.all():
            gpt2.transformer.h[0].output[:] = 0
            hidden_states.append(gpt2.transformer.h[-1].output)
        tokens = tracer.result.save()
    with edited(gpt2._module, "transformer.h.0", torch.zeros_like):
        expected = steps_of(gpt2, LAST)
        assert torch.equal(tokens, generated(gpt2, "Hello", **exactly(NUM_TOKENS)))
    assert len(hidden_states) == NUM_TOKENS
    assert all(map(torch.equal, hidden_states, expected))


def test_an_intervention_in_one_step_only(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", **exactly(NUM_TOKENS)) as tracer:
        outputs = save([])
        for step in tracer.iter[:]:
            if step == 2:
                gpt2.transformer.h[0].output[:] = 0
            outputs.append(gpt2.transformer.h[-1].output)
        tokens = tracer.result.save()
    with edited(gpt2._module, "transformer.h.0", torch.zeros_like, calls=range(2, 3)):
        expected = steps_of(gpt2, LAST)
    with edited(gpt2._module, "transformer.h.0", torch.zeros_like, calls=range(2, 3)):
        assert torch.equal(tokens, generated(gpt2, "Hello", **exactly(NUM_TOKENS)))
    assert len(outputs) == NUM_TOKENS
    assert all(map(torch.equal, outputs, expected))
    assert not torch.equal(outputs[2], steps_of(gpt2, LAST)[2])


def test_next_moves_the_cursor(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", **exactly(4)) as tracer:
        out0 = gpt2.lm_head.output.save()
        tracer.next()
        out1 = gpt2.lm_head.output.save()
        tracer.next(2)
        out3 = gpt2.lm_head.output.save()
    with gpt2.generate("Hello", **exactly(3)):
        hidden0 = gpt2.transformer.h[-1].output.save()
        hidden1 = gpt2.transformer.h[-1].next().output.save()
        hidden2 = gpt2.transformer.h[-1].next().output.save()
    expected = steps_of(gpt2, "lm_head", 4)
    assert all(map(torch.equal, [out0, out1, out3], [expected[step] for step in (0, 1, 3)]))
    assert all(map(torch.equal, [hidden0, hidden1, hidden2], steps_of(gpt2, LAST, 3)))


def test_next_beyond_the_last_step_is_a_warning_that_names_the_value(gpt2: LanguageModel, where: str) -> None:
    # The document's own example asks for step 3 of 3 tokens, whose steps are 0, 1 and 2.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gpt2.generate("Hello", **exactly(3)) as tracer:
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


# The document's footgun: code after an unbounded loop never runs. Here it does.


def test_code_after_an_unbounded_loop_runs_once_generation_is_over(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", **exactly(3)) as tracer:
        num_steps = 0
        for _ in tracer.iter[:]:
            hidden = gpt2.transformer.h[-1].output.save()
            num_steps += 1
        num_steps = save(num_steps)
        final_tokens = gpt2.generator.output.save()
        tokens = tracer.result.save()
    assert num_steps == 3
    assert torch.equal(hidden, steps_of(gpt2, LAST, 3)[-1])
    assert torch.equal(final_tokens, tokens)
    assert torch.equal(tokens, generated(gpt2, "Hello", **exactly(3)))


@pytest.mark.parametrize("stop", [3, 9, None])
def test_a_value_that_can_no_longer_come_after_a_loop_is_an_error_that_names_it(
    gpt2: LanguageModel, stop: int | None
) -> None:
    with pytest.raises(MissedProviderError) as caught, gpt2.generate("Hello", **exactly(3)) as tracer:
        for _ in tracer.iter[:stop]:
            hidden = gpt2.transformer.h[-1].output.save()
        gpt2.transformer.h[0].output.save()
    assert str(caught.traceback[-1].path) == __file__
    assert "gpt2.transformer.h[0].output.save()" in str(caught.traceback[-1].statement)
    assert torch.equal(hidden, steps_of(gpt2, LAST, 3)[-1])  # saved before the error, and given back
    message = str(caught.value)
    assert "`model.transformer.h.0.output.i3` was not provided" in message
    assert "generation, has ended" in message
    for way in ("if step == 2:", "with tracer.invoke():", "tracer.result"):
        assert way in message


def test_a_step_that_was_named_and_does_not_come_is_an_error(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match="step 5 was not reached"),
        gpt2.generate("Hello", **exactly(3)) as tracer,
    ):
        for _step in tracer.iter[5]:
            gpt2.lm_head.output.save()


def test_a_separate_empty_invoke_has_a_cursor_of_its_own(gpt2: LanguageModel) -> None:
    with gpt2.generate(**exactly(3)) as tracer:
        with tracer.invoke("Hello"):
            for _ in tracer.iter[:]:
                hidden = gpt2.transformer.h[-1].output.save()
        with tracer.invoke():
            final_logits = gpt2.output.logits.save()
    assert torch.equal(hidden, steps_of(gpt2, LAST, 3)[-1])
    assert torch.equal(final_logits, steps_of(gpt2, "lm_head", 3)[0])


def test_a_bounded_loop_is_left_and_a_later_step_can_be_asked_for(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", **exactly(4)) as tracer:
        for _ in tracer.iter[:2]:
            hidden = gpt2.transformer.h[-1].output.save()
        # After a loop, the next call to come is meant; the output of the second step comes next.
        logits = gpt2.output.logits.save()
        tracer.next()
        third = gpt2.transformer.h[-1].output.save()
    assert torch.equal(hidden, steps_of(gpt2, LAST, 4)[1])
    assert torch.equal(logits, steps_of(gpt2, "lm_head", 4)[1])
    assert torch.equal(third, steps_of(gpt2, LAST, 4)[2])


def test_next_in_a_plain_loop_gives_explicit_control(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", **exactly(4)) as tracer:
        values = save([])
        for _ in range(3):
            values.append(gpt2.transformer.h[-1].output)
            tracer.next()
        final_logits = gpt2.output.logits.save()
    assert all(map(torch.equal, values, steps_of(gpt2, LAST, 4)))
    assert torch.equal(final_logits, steps_of(gpt2, "lm_head", 4)[3])
