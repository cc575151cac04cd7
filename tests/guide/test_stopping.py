"""The rest of the model need not run."""

from __future__ import annotations

import torch

from nnsight_engine import LanguageModel, save
from tests.guide.alone import generated, tokens
from tests.hook_reference import outputs_of, recorded


def test_nothing_after_the_stop_runs_and_nothing_is_raised(local_gpt2: LanguageModel) -> None:
    gpt2, reached = local_gpt2, list[str]()
    with recorded(gpt2._module, "transformer.h.1", "transformer.h.2", "lm_head") as ran:
        with gpt2.trace("Hello") as tracer:
            values = save([])
            for layer in range(2):
                values.append(gpt2.transformer.h[layer].output)
            tracer.stop()
            reached.append("after")
    assert reached == []
    assert [len(one) for one in ran.values()] == [1, 0, 0]
    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0", "transformer.h.1")
    assert all(map(torch.equal, values, expected))


def test_generation_stops_at_a_step_and_the_model_can_be_traced_again(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=50) as tracer:
        tokens_so_far = save([])
        for step in tracer.iter[:]:
            tokens_so_far.append(gpt2.lm_head.output[0, -1].argmax().item())
            if step == 2:
                tracer.stop()
    assert tokens_so_far == generated(gpt2, "Hello", max_new_tokens=3)[0, -3:].tolist()
    with gpt2.trace("Hello"):
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, *outputs_of(gpt2._module, tokens(gpt2, "Hello"), "lm_head"))


def test_a_block_that_catches_the_stop_has_stopped_all_the_same(local_gpt2: LanguageModel) -> None:
    # What stop() raises is an Exception, as documented, so that scripts catch it along with others.
    gpt2 = local_gpt2
    with recorded(gpt2._module, "transformer.h.1", "transformer.h.2") as ran:
        with gpt2.trace("Hello") as tracer:
            steps = save([])
            gpt2.transformer.h[1].output.save()
            try:
                tracer.stop()
            except Exception:  # noqa: BLE001 - the subject
                steps.append("caught")
            steps.append("went on")
            gpt2.transformer.h[2].output.save()
            steps.append("not reached")
    assert steps == ["caught", "went on"]
    assert [len(values) for values in ran.values()] == [1, 0]


def test_a_stop_that_is_caught_last_stops_the_others_too(local_gpt2: LanguageModel) -> None:
    gpt2 = local_gpt2
    with recorded(gpt2._module, "transformer.h.0", "transformer.h.2") as ran:
        with gpt2.trace() as tracer:
            with tracer.invoke("Hello"):
                gpt2.transformer.h[0].output.save()
                try:
                    tracer.stop()
                except Exception:  # noqa: BLE001 - the subject
                    gpt2.lm_head  # noqa: B018 - something that asks for nothing
            with tracer.invoke("Hello"):
                steps = save([])
                gpt2.transformer.h[2].output.save()
                steps.append("not reached")
    assert steps == []
    assert [len(values) for values in ran.values()] == [1, 0]
