"""Plain Python statements on real values, in traces and sessions."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import LanguageModel, save
from tests.guide.alone import module_of
from tests.hook_reference import edited, outputs_of


@pytest.mark.parametrize(("bound", "is_zeroed"), [(100000, True), (-100000, False)])
def test_if_takes_the_branch_of_the_real_values(gpt2: LanguageModel, bound: float, is_zeroed: bool) -> None:
    with gpt2.trace("Hello"):
        output = gpt2.transformer.h[0].output
        if torch.all(output < bound):
            gpt2.transformer.h[-1].output[:] = 0
            branch = save("zeroed")
        else:
            branch = save("untouched")
        result = gpt2.transformer.h[-1].output.save()
    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    (untouched,) = outputs_of(gpt2._module, inputs, "transformer.h.3")
    assert branch == ("zeroed" if is_zeroed else "untouched")
    assert torch.equal(result, torch.zeros_like(untouched) if is_zeroed else untouched)


def test_if_works_in_a_trace_of_a_session(gpt2: LanguageModel) -> None:
    with gpt2.session(), gpt2.trace("Hello"):
        if torch.all(gpt2.transformer.h[2].output < 100000):
            gpt2.transformer.h[-1].output[:] = 0
        output = gpt2.transformer.h[-1].output.save()
    assert not output.any()


def test_a_for_loop_in_a_session_runs_its_trace_for_each_item(gpt2: LanguageModel) -> None:
    prompts = ["Hello", "World", "Test"]
    with gpt2.session():
        results = save([])
        for prompt in prompts:
            with gpt2.trace(prompt):
                results.append(gpt2.lm_head.output.argmax(dim=-1))
    assert len(results) == 3
    for prompt, result in zip(prompts, results, strict=True):
        (logits,) = outputs_of(gpt2._module, gpt2.tokenizer(prompt, return_tensors="pt"), "lm_head")
        assert torch.equal(result, logits.argmax(dim=-1))


def test_a_later_trace_of_a_session_uses_what_an_earlier_one_read(gpt2: LanguageModel) -> None:
    with gpt2.session():
        with gpt2.trace("Hello"):
            hs1 = gpt2.transformer.h[0].output.save()
        with gpt2.trace("World"):
            gpt2.transformer.h[0].output[:] = hs1
            hs2 = gpt2.transformer.h[0].output.save()
            logits = gpt2.lm_head.output.save()
    plain = module_of(gpt2)
    (hello,) = outputs_of(plain, gpt2.tokenizer("Hello", return_tensors="pt"), "transformer.h.0")
    with edited(plain, "transformer.h.0", lambda _: hello):
        (expected,) = outputs_of(plain, gpt2.tokenizer("World", return_tensors="pt"), "lm_head")
    assert torch.equal(hs1, hello)
    assert torch.equal(hs2, hello)
    assert torch.equal(logits, expected)


def test_values_flow_between_the_traces_of_a_session_without_saving(gpt2: LanguageModel) -> None:
    clean_text, corrupted_text = " the city of Paris is", " the city of Rome is"
    with gpt2.session():
        with gpt2.trace(clean_text):
            hs = gpt2.transformer.h[1].output[:, -1, :]
        with gpt2.trace(corrupted_text):
            clean = gpt2.lm_head.output[0][-1].save()
        with gpt2.trace(corrupted_text):
            gpt2.transformer.h[1].output[:, -1, :] = hs
            patched = gpt2.lm_head.output[0][-1].save()
    plain, tokenizer = module_of(gpt2), gpt2.tokenizer
    inputs = tokenizer(corrupted_text, return_tensors="pt")
    (source,) = outputs_of(plain, tokenizer(clean_text, return_tensors="pt"), "transformer.h.1")

    def patch(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :-1], source[:, -1:]], dim=1)

    (untouched,) = outputs_of(plain, inputs, "lm_head")
    with edited(plain, "transformer.h.1", patch):
        (expected,) = outputs_of(plain, inputs, "lm_head")
    assert torch.equal(clean, untouched[0, -1])
    assert torch.equal(patched, expected[0, -1])
    assert not torch.equal(clean, patched)


def test_what_a_session_does_not_save_ends_with_it(gpt2: LanguageModel) -> None:
    with gpt2.session(), gpt2.trace("Hello"):
        hs = gpt2.transformer.h[0].output
    with pytest.raises(NameError, match="hs"):
        hs  # noqa: B018 - reading it is the test
