"""A block that is sent to the local engine, or all the way within this process, does what it does here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_engine.core.saves import save
from nnsight_engine.modeling.language import LanguageModel
from tests.unit.local_engine.bench import OTHER, TEXT, Bench

How = dict[str, Any]
THREE: How = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}


def reads_and_writes(model: LanguageModel, how: How) -> Any:
    factor = torch.tensor(3.0)
    with model.trace(TEXT, **how):
        norm = model.points["layers.0.attn.heads"].norm().save()
        hidden = model.model.layers[1].output.clone().save()
        model.model.layers[1].output[:] *= factor
        logits = model.lm_head.output.save()
    return hidden, logits, norm


def invokes_of_one_batch(model: LanguageModel, how: How) -> Any:
    with model.trace(**how) as tracer:
        barrier = tracer.barrier(2)
        kept = save(list[Any]())
        for index, text in enumerate([TEXT, OTHER]):
            with tracer.invoke(text):
                rows = model.lm_head.output.shape[0]
                kept.append((index, rows))
        with tracer.invoke(TEXT):
            embedded = model.model.embed_tokens.output
            barrier()
        with tracer.invoke([" the city of Rome", OTHER]):
            barrier()
            model.model.embed_tokens.output[:, -1] = embedded[:, -1] * 2
            logits = model.lm_head.output.save()
        with tracer.invoke():
            every = model.lm_head.output.save()
    assert kept == [(0, 1), (1, 1)]
    return logits, every


def generation(model: LanguageModel, how: How) -> Any:
    with model.generate(TEXT, max_new_tokens=4, min_new_tokens=4, **how) as tracer:
        hidden = save(list[Any]())
        for step in tracer.iter[1:3]:
            hidden.append((step, model.model.layers[0].output[0, -1].sum().item()))
        result = tracer.result.save()
    with model.generate(TEXT, max_new_tokens=4, min_new_tokens=4, **how) as tracer:
        tokens = model.generator.output.save()
    assert [step for step, _ in hidden] == [1, 2]
    assert torch.equal(result, tokens)
    return hidden, result


def all_and_next_steps(model: LanguageModel, how: How) -> Any:
    with model.generate(TEXT, **THREE, **how) as tracer:
        first = model.lm_head.output[0, -1].argmax(-1).save()
        second = model.next().lm_head.output[0, -1].argmax(-1).save()
    with model.generate(TEXT, **THREE, **how) as tracer:
        every = save(list[Any]())
        for _ in tracer.all():
            every.append(model.lm_head.output[0, -1].argmax(-1).item())
    assert every[:2] == [first.item(), second.item()]
    assert len(every) == 3
    return every


def older_loops_in_traces_that_generate(model: LanguageModel, how: How) -> Any:
    with model.trace(TEXT, **THREE, **how) as tracer:
        tokens = save(list[Any]())
        with tracer.iter[1:] as step:
            tokens.append((step, model.lm_head.output[0, -1].argmax().item()))
        result = tracer.result.save()
    assert [step for step, _ in tokens] == [1, 2]
    return tokens, result.tolist()


def stops(model: LanguageModel, how: How) -> Any:
    with model.trace(TEXT, **how) as tracer:
        early = model.model.layers[0].output.save()
        tracer.stop()
    with model.trace(TEXT, **how) as tracer:
        seen = save(list[Any]())
        model.model.layers[0].output.sum()
        try:
            tracer.stop()
        except Exception:  # noqa: BLE001 - the subject
            seen.append("caught")
        model.lm_head.output.sum()
        seen.append("not reached")
    assert seen == ["caught"]
    return early


def forget_gradients(model: LanguageModel) -> None:
    module: Any = model._module
    module.zero_grad()  # of a model here


def gradients(model: LanguageModel, how: How) -> Any:
    forget_gradients(model)
    with model.trace(TEXT, **how):
        hidden = model.model.layers[1].output
        hidden.requires_grad_(True)
        loss = model.lm_head.output.sum()
        with loss.backward():
            grad = hidden.grad.clone().save()
            hidden.grad[:] = hidden.grad * 2
        weights = model.lm_head.weight.grad.clone().save()
    with model.trace(TEXT, **how):
        hidden = model.model.layers[0].output
        hidden.requires_grad = True
        with model.lm_head.output.sum().backward():
            assigned = hidden.grad.save()
    assert grad.any()
    assert assigned.any()
    return grad, weights, assigned


def plain_backward_twice(model: LanguageModel, how: How) -> Any:
    found = []
    for _ in range(2):
        forget_gradients(model)
        with model.trace(TEXT, **how):
            model.lm_head.output.sum().backward()
            grad = model.lm_head.weight.grad.clone().save()
        found.append(grad)
    assert torch.equal(*found)
    return found


def sources_of_operations(model: LanguageModel, how: How) -> Any:
    with model.trace(TEXT, **how):
        inner = model.model.layers[0].self_attn.source.attention_interface_0.source
        attended = inner.contiguous_0.output.save()
        projected = model.model.layers[0].mlp.source.self_down_proj_0.output.save()
    return attended, projected


def caches(model: LanguageModel, how: How) -> Any:
    with model.trace(TEXT, **how) as tracer:
        some = tracer.cache(modules=[model.model.layers[0], model.lm_head], include_inputs=True)
    assert torch.equal(some["model.lm_head"].output, some.model.lm_head.output)
    found = [(path, some[path].input, some[path].output) for path in some]
    del some  # or the next block would be sent it
    with model.generate(TEXT, **THREE, **how) as tracer:
        every = tracer.cache()
    steps = [(step.input, step.output) for step in every.model.lm_head]
    assert len(every["model.lm_head"]) == len(steps) == 3
    assert torch.equal(every["model.model.layers"][1].output[2], every.model.model.layers[1][2].output)
    return [*(one[1:] for one in found), *steps, every["model.model.layers.0.mlp"][1].input]


def skips_and_module_calls(model: LanguageModel, how: How) -> Any:
    with model.trace(TEXT, **how):
        hidden = model.model.layers[0].output
        model.model.layers[1].skip(hidden)
        early = model.lm_head(model.model.norm(hidden)).save()
        final = model.lm_head.output.save()
    return early, final


def edits(model: LanguageModel, how: How) -> Any:
    scale = 0.5
    with model.edit() as edited:
        model.model.layers[0].output[:] *= scale
    with edited.trace(TEXT, **how):
        logits = edited.lm_head.output.save()
    with model.trace(TEXT, **how):
        plain = model.lm_head.output.save()
    assert not torch.equal(logits, plain)
    return logits, plain


def sessions(model: LanguageModel, how: How) -> Any:
    with model.session(**how):
        with model.trace(TEXT):
            hidden = model.model.layers[0].output
        steps = save(list[Any]())
        for factor in range(2):
            with model.trace(OTHER):
                model.model.layers[0].output[:] = hidden[:, -1:] * factor
                last = model.lm_head.output[0, -1].save()
            steps.append(last.sum().item())
    return steps, last


@pytest.mark.filterwarnings("ignore:`with tracer.iter:DeprecationWarning")
@pytest.mark.parametrize(
    "block",
    [
        reads_and_writes, invokes_of_one_batch, generation, all_and_next_steps,
        older_loops_in_traces_that_generate, stops, gradients, plain_backward_twice, sources_of_operations,
        caches, skips_and_module_calls, edits, sessions,
    ],
)  # fmt: skip
def test_it_gives_the_same_here_and_there(bench: Bench, block: Callable[[LanguageModel, How], Any]) -> None:
    here = block(bench.local, {})
    for model, how in ((bench.client, {"backend": bench.elsewhere()}), (bench.local, {"remote": "local"})):
        torch.testing.assert_close(block(model, how), here, rtol=0, atol=0)
    torch.testing.assert_close(block(bench.local, {}), here, rtol=0, atol=0, msg="the model is as it was")
    assert bench.client.lm_head.weight.is_meta
    assert all(parameter.grad is None for parameter in bench.engine._module.parameters())
    assert not bench.engine._sources  # noqa: SLF001 - what is left is seen nowhere else
    assert not bench.runner.needs_replacement
