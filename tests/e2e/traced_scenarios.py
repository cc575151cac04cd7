"""Traced blocks that every topology plays: one worker, stages and ranks, trusted and in sandbox processes.

A scenario is a function of an engine of the tiny Llama, and returns what its blocks find. This may not depend
on where the model's layers are, or on where the block runs. What else it promises, it asserts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.remote_backend.values.outcomes import Outcome
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.point_blocks import OTHER, PROMPT
from tests.e2e.traces import (
    HeldTracer,
    Plain,
    Recomputed,
    counted_recomputations,
    live_objects,
    run_and_abort,
    run_together,
)

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
MANY_STEPS: Final = 20_000
"""Enough for steps without tokens, which wait for sandbox processes."""

Values = dict[str, Any]
Scenario = Callable[[VLLM], Values]


def whole_model(model: VLLM) -> Values:
    with model.trace(PROMPT, **GREEDY):
        tokens = model.model.inputs[0][0].save()
        embedded = model.model.embed_tokens.output.save()
        hidden = model.model.output.save()
    return {"embedded": embedded, "tokens": tokens, "hidden": hidden}


def writes_seen_in_later_layers(model: VLLM) -> Values:
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            model.model.layers[0].mlp.output[:] *= -1
            model.model.layers[1].output = [tensor * 1.5 for tensor in model.model.layers[1].output]
            seen.append(model.layers[3].output.clone())
            seen.append(model.logits.output.clone())
    return {"seen": seen}


def value_carried_to_a_later_layer(model: VLLM) -> Values:
    with model.trace(PROMPT, **GREEDY):
        early = model.layers[0].output
        model.layers[3].mlp.output[:] += early
        logits = model.logits.output.save()
    return {"logits": logits}


def value_carried_to_the_next_token(model: VLLM) -> Values:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        late, seen = torch.zeros(1, 128), save([])
        for _ in tracer.iter[:]:
            model.layers[1].output[:] += late
            seen.append(model.layers[1].output.clone())
            late = model.layers[3].output[-1:].clone()
            seen.append(model.samples.output.item())
        result = tracer.result.save()
    return {"seen": seen, "tokens": list(result.outputs[0].token_ids)}


def tokens_written(model: VLLM) -> Values:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        first = model.layers[0].output.clone().save()
        model.samples.output = torch.tensor([[7]])
        second = model.next().layers[0].output.clone().save()
        queries = model.layers[1].attn.q.clone().save()
        model.logits.output[:] = torch.nn.functional.one_hot(torch.tensor([9]), 319) * 100.0
        result = tracer.result.save()
    tokens = list(result.outputs[0].token_ids)
    assert tokens[:2] == [7, 9]
    return {"first": first, "second": second, "queries": queries, "tokens": tokens}


def invokes_that_wait_for_each_other(model: VLLM) -> Values:
    with model.trace(**GREEDY) as tracer:
        order = save([])
        barrier = tracer.barrier(2)
        with tracer.invoke(OTHER):
            late = model.layers[0].output[-1].clone()
            order.append("early")
            barrier()
            later = model.layers[2].output[-1].clone()
            order.append("late")
            barrier()
        with tracer.invoke(PROMPT, max_tokens=2):
            barrier()
            model.layers[0].output[-1] = late
            barrier()
            model.layers[2].output[-1] = later
            order.append("patched")
            logits = model.logits.output.save()
    assert order == ["early", "late", "patched"]
    return {"logits": logits}


def modules_skipped(model: VLLM) -> Values:
    with model.trace(PROMPT, **GREEDY):
        model.model.layers[0].mlp.skip(model.model.layers[0].mlp.input * 0.5)
        model.layers[2].skip(model.layers[2].input * 2)
        logits = model.logits.output.save()
    return {"logits": logits}


def stopped(model: VLLM) -> Values:
    with model.trace(PROMPT, max_tokens=50, **GREEDY) as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            seen.append(model.layers[0].output.clone())
            if step == 2:
                tracer.stop()
            seen.append(model.samples.output.item())
    assert len(seen) == 5
    return {"seen": seen}


def modules_called(model: VLLM) -> Values:
    with model.trace(PROMPT, **GREEDY):
        first = model.model.embed_tokens(torch.tensor([9])).save()
        early = model.layers[0].output
        again = model.model.layers[1].mlp(early).save()
        down = save(model.model.layers[1].mlp.down_proj(torch.ones(3, 192))[0])
        token = model.model.embed_tokens(torch.tensor([7])).save()
        late = model.layers[3].output
        lens = model.lm_head(model.norm(early)).save()
        mlp = model.model.layers[3].mlp(model.norm(late)).save()
    return {"first": first, "again": again, "down": down, "token": token, "lens": lens, "mlp": mlp}


def several_choices(model: VLLM) -> Values:
    with model.trace(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True) as tracer:
        tokens, drawn = save([]), save(torch.randn(2))
        for _ in tracer.iter[:]:
            model.layers[1].attn.v[:] *= 1.5
            tokens.append(model.samples.output.item())
        result = tracer.result.save()
    assert [list(choice.token_ids) for choice in result[0].outputs] == tokens
    assert len({tuple(one) for one in tokens}) > 1
    assert all(len(one) == 2 for one in drawn)
    return {"tokens": tokens}


def a_cache(model: VLLM) -> Values:
    with model.trace(PROMPT, **GREEDY) as tracer:
        cache = tracer.cache(modules=[model.model.layers[1].mlp.gate_up_proj, model.model.layers[2].mlp])
    return {name: entry.output for name, entry in cache.items()}


SCENARIOS: Final[list[Scenario]] = [
    whole_model,
    writes_seen_in_later_layers,
    value_carried_to_a_later_layer,
    value_carried_to_the_next_token,
    tokens_written,
    invokes_that_wait_for_each_other,
    modules_skipped,
    stopped,
    modules_called,
    several_choices,
    a_cache,
]


def named(scenario: Scenario) -> str:
    return scenario.__name__


def assert_same(found: Values, expected: Values) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def still_works(model: VLLM) -> bool:
    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        queries = model.layers[1].attn.q.shape.save()
        lens = model.lm_head(model.norm(model.layers[2].output)).save()
        tokens = save([])
        for _ in tracer.iter[:]:
            tokens.append(model.samples.output.item())
    return tuple(queries) == (len(PROMPT), 4, 32) and lens.shape == (len(PROMPT), 319) and len(tokens) == 2


# Failures.


def failing_at(model: VLLM, layer: int) -> dict[str, SentTrace]:
    """Return traces that end badly at a layer, by the names of the errors that one of them may end with."""
    held: dict[str, Any] = {}
    options: dict[str, Any] = {"max_tokens": 8, "tracer_cls": HeldTracer, **GREEDY}
    with model.trace(PROMPT, **options) as held[f"KeyError at {layer}"]:
        model.layers[layer].output.sum()
        raise KeyError("mine")
    with model.trace(PROMPT, **options) as held[f"TimeBudgetError or SandboxEndedError at {layer}"]:
        model.layers[layer].output.sum()
        while True:
            pass
    with model.trace(PROMPT, **options) as held[f"ValueError at {layer}"]:
        model.layers[layer].output = torch.zeros(3, 3)
    return {name: tracer.sent for name, tracer in held.items()}


def ending_its_process(model: VLLM, layer: int) -> dict[str, SentTrace]:
    """Return the trace that ends its sandbox process, likewise."""
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as tracer:
        model.layers[layer].output.sum()
        exec("import os; os._exit(0)")
    return {f"SandboxEndedError at {layer}": tracer.sent}


def idle(model: VLLM) -> SentTrace:
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as tracer:
        pass
    sent: SentTrace = tracer.sent
    return sent


def neighbours() -> list[Plain]:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5)
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True, logprobs=5)
    prompts = [[number + 5, *OTHER] for number in range(3)]
    return [
        Plain({"prompt_token_ids": prompt}, drawn if number % 2 else greedy)
        for number, prompt in enumerate(prompts)
    ]


def assert_each_fails_alone(model: VLLM, failing: Mapping[str, SentTrace], *, at_once: bool = True) -> None:
    """Run traces beside plain requests: they fail as named, and the requests keep every bit.

    Those of sandboxes do not run at once, for they share the time for which a step waits for their tenant.
    """
    plain = neighbours()
    groups = [list(failing)] if at_once else [[name] for name in failing]
    # As many rows in each step, for whose number products are rounded.
    calm = run_together(model, [idle(model) for _ in groups[0]], plain, late=1, max_steps=MANY_STEPS)
    for names in groups:
        traces = [failing[name] for name in names]
        ran = run_together(model, traces, plain, late=1, max_steps=MANY_STEPS)
        for number in range(len(plain)):
            assert ran.tokens(f"plain-{number}") == calm.tokens(f"plain-{number}"), names
            assert ran.logprobs(f"plain-{number}") == calm.logprobs(f"plain-{number}") != [], names
        for number, name in enumerate(names):
            assert_failed_as(name, ran.outcomes[number])
    assert still_works(model)


def assert_failed_as(name: str, outcome: Outcome) -> None:
    """See that a trace failed with an error of a class that is named."""
    kinds = {kind.__name__ for kind in type(outcome.error).__mro__}
    assert kinds & set(name.split()), (name, outcome.error)


def assert_an_abort_leaves_nothing(model: VLLM, held: dict[str, int]) -> None:
    """Abort a trace, until which the workers hold this."""
    with model.trace(PROMPT, max_tokens=100, tracer_cls=HeldTracer, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            model.layers[1].attn.q[:] = 0
    assert run_and_abort(model, tracer.sent, num_tokens=4) == held
    assert not live_objects(model)


# Preemption.


def generating(model: VLLM, number: int, busy_s: float = 0.0) -> SentTrace:
    """Return a trace that writes inside a layer, and reads inside the next, at each of 50 tokens.

    Its prompt and its tokens take four blocks of 32. At the third token the block computes for ``busy_s``
    between the write and the read.
    """
    prompt = [(token + number) % 319 for token in PROMPT * 7]
    direction = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
    layer = number % 3
    with model.trace(prompt, max_tokens=50, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows, tokens = save([]), save([])
        for step in tracer.iter[:]:
            model.layers[layer].attn.heads[:] += direction
            end = time.process_time() + busy_s
            while step == 2 and time.process_time() < end:
                pass
            rows.append(model.layers[layer + 1].attn.k)
            tokens.append(model.samples.output.item())
    sent: SentTrace = tracer.sent
    return sent


def generated_alone(model: VLLM, count: int) -> list[Values]:
    """Return what such traces save, each run alone."""
    return [run_together(model, [generating(model, number)]).outcomes[0].saves for number in range(count)]


def assert_generated(model: VLLM, alone: Sequence[Values], busy_s: float = 0.0) -> Recomputed:
    """Run such traces together: each saves what it does alone. Returns how often requests were recomputed."""
    with counted_recomputations(model) as counted:
        sent = [generating(model, number, busy_s) for number in range(len(alone))]
        ran = run_together(model, sent, max_steps=MANY_STEPS)
    for number, expected in enumerate(alone):
        outcome = ran.outcomes[number]
        assert outcome.error is None, outcome.error
        assert outcome.saves["tokens"] == expected["tokens"] == ran.tokens(f"trace-{number}")
        torch.testing.assert_close(outcome.saves["rows"], expected["rows"], rtol=1e-3, atol=1e-3)
    return counted
