"""Sessions: traces that share their values, and plain Python between them and within."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import LanguageModel, save
from tests.guide.alone import tokens
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
    (untouched,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.3")
    assert branch == ("zeroed" if is_zeroed else "untouched")
    assert torch.equal(result, torch.zeros_like(untouched) if is_zeroed else untouched)


def test_a_session_loops_over_traces_and_branches_between_them(gpt2: LanguageModel) -> None:
    prompts = ["Hello", "World"]
    with gpt2.session():
        results = save([])
        for prompt in prompts:
            with gpt2.trace(prompt):
                results.append(gpt2.lm_head.output.argmax(dim=-1))
                mean = gpt2.lm_head.output.mean()
        branch = save("positive" if mean > 0 else "negative")
        if mean > 0:
            with gpt2.trace("Tower"):
                chosen = gpt2.transformer.h[1].output.save()
        else:
            with gpt2.trace("Tower"):
                chosen = gpt2.transformer.h[2].output.save()
    logits = [outputs_of(gpt2._module, tokens(gpt2, prompt), "lm_head")[0] for prompt in prompts]
    assert all(map(torch.equal, results, [one.argmax(dim=-1) for one in logits]))
    is_positive = bool(logits[-1].mean() > 0)
    assert branch == ("positive" if is_positive else "negative")
    path = f"transformer.h.{1 if is_positive else 2}"
    assert torch.equal(chosen, *outputs_of(gpt2._module, tokens(gpt2, "Tower"), path))


def test_values_flow_between_the_traces_of_a_session_without_saving(gpt2: LanguageModel) -> None:
    clean_text, corrupted_text = " the city of Paris is", " the city of Rome is"
    with gpt2.session():
        with gpt2.trace(clean_text):
            hs = gpt2.transformer.h[1].output[:, -1, :]
        with gpt2.trace(corrupted_text):
            clean = gpt2.lm_head.output[0][-1].save()
        with gpt2.trace() as tracer, tracer.invoke(corrupted_text):
            gpt2.transformer.h[1].output[:, -1, :] = hs
            patched = gpt2.lm_head.output[0][-1].save()
    (source,) = outputs_of(gpt2._module, tokens(gpt2, clean_text), "transformer.h.1")

    def patch(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :-1], source[:, -1:]], dim=1)

    (untouched,) = outputs_of(gpt2._module, tokens(gpt2, corrupted_text), "lm_head")
    with edited(gpt2._module, "transformer.h.1", patch):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, corrupted_text), "lm_head")
    assert torch.equal(clean, untouched[0, -1])
    assert torch.equal(patched, expected[0, -1])
    assert not torch.equal(clean, patched)
    with pytest.raises(NameError, match="hs"):
        hs  # noqa: B018 - reading it is the test
