"""Blocks over two pipeline stages: the values, writes and errors of one stage, without effect on others."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.envoys.source.errors import SourceNotAvailableError
from nnsight_engine.interleaving.events import MissedProviderError, OutOfOrderError
from nnsight_engine.interleaving.threads import TimeBudgetError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.request_tracer import SentTrace
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError, StageError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.point_blocks import BLOCKS
from tests.e2e.sandboxed import in_sandboxes
from tests.e2e.traces import (
    HeldTracer,
    Plain,
    Ran,
    counted_recomputations,
    errors_beside,
    live_objects,
    run_and_abort,
    run_together,
    traced_engine,
)
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT: Final = [45, 257, 80, 301, 77, 78, 260, 90]
OTHER: Final = [91, 120, 33, 44, 260, 18, 77, 45]
LONG: Final = [7 + 3 * position % 250 for position in range(100)]
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
OPTIONS: Final[dict[str, Any]] = {
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 14,
    "limits": EngineLimits(trace_step_s=3.0, sandbox_step_s=10.0),
}
"""Steps of 64 tokens and little memory, so that prompts come in chunks and requests are preempted."""

_MAX_STEPS: Final = 20_000
"""Enough for steps without tokens, which wait for sandbox processes."""

Scenario = Callable[[VLLM], dict[str, Any]]


# Layers 0 and 1 are on the first stage, 2 and 3 on the second. What each gives must not depend on that.


def every_module(model: VLLM) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for path, module in model.named_modules():
        if "rotary" in path:
            continue  # one module for all layers of a stage, so its first call is another one
        with model.trace(PROMPT, **GREEDY):
            try:
                inputs, outputs = module.inputs, module.output
            except MissedProviderError:
                inputs, outputs = [], None
            found = save([inputs, outputs])
        seen[path] = found
    return seen


def whole_model(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, **GREEDY):
        tokens = model.model.inputs[0][0].save()
        embedded = model.model.embed_tokens.output.save()
        hidden = model.model.output.save()
    return {"embedded": embedded, "tokens": tokens, "hidden": hidden}


def writes_on_one_stage_seen_on_the_other(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            model.model.layers[0].mlp.output[:] *= -1
            model.model.layers[1].output = [tensor * 1.5 for tensor in model.model.layers[1].output]
            seen.append(model.layers[3].output.clone())
    return {"seen": seen}


def value_carried_to_the_next_stage(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, **GREEDY):
        early = model.layers[0].output
        model.layers[3].mlp.output[:] += early
        logits = model.logits.output.save()
    return {"logits": logits}


def value_carried_to_the_next_token(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        late, seen = torch.zeros(1, 128), save([])
        for _ in tracer.iter[:]:
            model.layers[1].output[:] += late
            seen.append(model.layers[1].output.clone())
            late = model.layers[3].output[-1:].clone()
            seen.append(model.samples.output.item())
        result = tracer.result.save()
    return {"seen": seen, "tokens": list(result.outputs[0].token_ids)}


def tokens_written(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        first = model.layers[0].output.clone().save()
        model.samples.output = torch.tensor([[7]])
        second = model.next().layers[0].output.clone().save()
        model.logits.output[:] = torch.nn.functional.one_hot(torch.tensor([9]), 319) * 100.0
        result = tracer.result.save()
    tokens = list(result.outputs[0].token_ids)
    assert tokens[:2] == [7, 9]
    return {"first": first, "second": second, "tokens": tokens}


def invokes_that_wait_for_each_other(model: VLLM) -> dict[str, Any]:
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


def modules_skipped(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, **GREEDY):
        model.model.layers[0].mlp.skip(model.model.layers[0].mlp.input * 0.5)
        model.layers[2].skip(model.layers[2].input * 2)
        logits = model.logits.output.save()
    return {"logits": logits}


def stopped_on_the_first_stage(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=50, **GREEDY) as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            seen.append(model.layers[0].output.clone())
            if step == 2:
                tracer.stop()
            seen.append(model.samples.output.item())
    return {"seen": seen}


def modules_called(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, **GREEDY):
        first = model.model.embed_tokens(torch.tensor([9])).save()
        early = model.layers[0].output
        again = model.model.layers[1].mlp(early).save()
        token = model.model.embed_tokens(torch.tensor([7])).save()
        width = save(model.model.layers[0].mlp.down_proj.input_size)
        late = model.layers[3].output
        lens = model.lm_head(model.norm(early)).save()
        mlp = model.model.layers[3].mlp(late).save()
    return {"first": first, "again": again, "token": token, "lens": lens, "mlp": mlp, "width": width}


def operations(model: VLLM) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for layer in range(4):
        with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
            found = save([])
            for _ in tracer.iter[:]:
                found.append(model.model.layers[layer].mlp.source.self_gate_up_proj_0.output[0])
                model.model.layers[layer].mlp.source.self_down_proj_0.input[:] *= 2
            result = tracer.result.save()
        seen[f"layer {layer}"] = [found, list(result.outputs[0].token_ids)]
    return seen


def several_choices(model: VLLM) -> dict[str, Any]:
    with model.trace(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=4) as tracer:
        tokens, drawn = save([]), save(torch.randn(2))
        for _ in tracer.iter[:]:
            model.layers[1].output[:] += 0.5
            tokens.append(model.samples.output.item())
        result = tracer.result.save()
    assert [list(choice.token_ids) for choice in result[0].outputs] == tokens
    assert all(len(one) == 2 for one in drawn)
    return {"tokens": tokens}


def prompts_in_chunks(model: VLLM) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    value = torch.randn(len(LONG), 128, generator=torch.Generator().manual_seed(0))
    for layer in (1, 2):
        with model.trace(LONG, max_tokens=2, **GREEDY) as tracer:
            read = model.layers[layer].output.save()
            token = model.samples.output.save()
            after = model.next().layers[layer].output.save()
        with model.trace(LONG, max_tokens=2, **GREEDY) as tracer:
            model.model.layers[layer].mlp.output = value
            result = tracer.result.save()
        seen[f"layer {layer}"] = [read, token, after, list(result.outputs[0].token_ids)]
        del result  # or the next block would be sent with it
        with pytest.raises(ChunkedPromptError, match=r"layers\.3"):
            with model.trace(LONG, **GREEDY):
                model.layers[layer].output
                model.layers[3].output
    return seen


SANDBOXED: Final[list[Scenario]] = [
    whole_model,
    writes_on_one_stage_seen_on_the_other,
    value_carried_to_the_next_stage,
    value_carried_to_the_next_token,
    tokens_written,
    invokes_that_wait_for_each_other,
    modules_skipped,
    stopped_on_the_first_stage,
    modules_called,
    several_choices,
    prompts_in_chunks,
    BLOCKS["patch_between_invokes"],
    BLOCKS["look_through_a_lens"],
]
"""Scenarios that run in sandbox processes too."""

SCENARIOS: Final[list[Scenario]] = [
    every_module,
    operations,
    *SANDBOXED,
    *(block for block in BLOCKS.values() if block not in SANDBOXED),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Any]:
    """Return what one stage gives."""
    with traced_engine(checkpoint, **OPTIONS) as model:
        found: dict[str, Any] = {scenario.__name__: scenario(model) for scenario in SCENARIOS}
        found["tree"] = repr(model)
        found["preempted"] = [outcome.saves for outcome in preempted(model).outcomes.values()]
        return found


@pytest.fixture(scope="module")
def model(checkpoint: Path, expected: dict[str, Any]) -> Iterator[VLLM]:
    """Start two stages, in processes of their own."""
    del expected  # the engine with one stage comes first, and has gone
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        with traced_engine(checkpoint, pipeline_parallel_size=2, **OPTIONS) as engine:
            yield engine


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_two_stages_do_what_one_does(model: VLLM, expected: dict[str, Any], scenario: Scenario) -> None:
    torch.testing.assert_close(scenario(model), expected[scenario.__name__], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scenario", SANDBOXED, ids=lambda scenario: str(scenario.__name__))
def test_sandboxed_blocks_do_on_two_stages_what_trusted_ones_do_on_one(
    model: VLLM, expected: dict[str, Any], scenario: Scenario
) -> None:
    with in_sandboxes(model):
        found = scenario(model)
    torch.testing.assert_close(found, expected[scenario.__name__], rtol=1e-4, atol=1e-4)


def test_the_tree_shows_the_modules_of_all_stages(model: VLLM, expected: dict[str, Any]) -> None:
    assert repr(model) == expected["tree"]


def generating(model: VLLM, number: int) -> SentTrace:
    """Return a trace that reads on both stages, and writes on one, at each of 50 tokens."""
    direction = torch.randn(128, generator=torch.Generator().manual_seed(number))
    with model.trace([number + 20, *LONG[:57]], max_tokens=50, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows, tokens = save([]), save([])
        for _ in tracer.iter[:]:
            model.model.layers[number % 3].mlp.output[:] += direction * 0.3
            rows.append(model.layers[1 + number % 3].output)
            tokens.append(model.samples.output.item())
    sent: SentTrace = tracer.sent
    return sent


def preempted(model: VLLM) -> Ran:
    """Run more than the engine has memory for."""
    return run_together(model, [generating(model, number) for number in range(6)])


def test_preempted_requests_read_once_and_write_again(model: VLLM, expected: dict[str, Any]) -> None:
    with counted_recomputations(model) as counted:
        ran = preempted(model)
    assert counted.num_preempted > 0
    for number, alone in enumerate(expected["preempted"]):
        outcome = ran.outcomes[number]
        assert outcome.error is None, outcome.error
        assert outcome.saves["tokens"] == alone["tokens"]
        torch.testing.assert_close(outcome.saves["rows"], alone["rows"], rtol=1e-3, atol=1e-3)


def failing(model: VLLM) -> list[SentTrace]:
    """Return traces that end badly, each in its own way, on either stage."""
    held = []
    for layer in (1, 3):
        with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as tracer:
            model.layers[layer].output
            raise KeyError("mine")
        held.append(tracer.sent)
        with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as tracer:
            model.layers[layer].output
            while True:
                pass
        held.append(tracer.sent)
        with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as tracer:
            model.layers[layer].output = torch.zeros(3, 3)
        held.append(tracer.sent)
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as tracer:
        while True:
            model.model.layers[0].mlp(model.layers[0].output)
            time.sleep(3600)
    held.append(tracer.sent)
    return held


def neighbours() -> list[Plain]:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5)
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True, logprobs=5)
    return [
        Plain({"prompt_token_ids": [number + 5, *OTHER]}, drawn if number % 2 else greedy)
        for number in range(5)
    ]


def test_whoever_fails_fails_alone_and_nobody_notices(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as idle:
        pass
    calm = run_together(model, [idle.sent], neighbours(), late=1)
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as well:
        seen = save([])
        for _ in well.iter[:]:
            for layer in model.model.layers:
                layer.mlp.output[:] += torch.randn(128)
            seen.append(model.samples.output.item())
    ran = run_together(model, [*failing(model), well.sent], neighbours(), late=1)
    for number in range(5):
        assert ran.tokens(f"plain-{number}") == calm.tokens(f"plain-{number}")
        assert ran.logprobs(f"plain-{number}") == calm.logprobs(f"plain-{number}")
    errors = [type(ran.outcomes[number].error) for number in range(7)]
    assert errors == [KeyError, TimeBudgetError, ValueError] * 2 + [TimeBudgetError]
    assert ran.outcomes[7].error is None
    assert ran.outcomes[7].saves["seen"] == ran.tokens("trace-7")


def test_sandboxed_requests_that_are_preempted_see_each_step_once(
    model: VLLM, expected: dict[str, Any]
) -> None:
    with in_sandboxes(model), counted_recomputations(model) as counted:
        sent = [generating(model, number) for number in range(6)]
        ran = run_together(model, sent, max_steps=_MAX_STEPS)
    assert counted.num_preempted > 0
    for number, alone in enumerate(expected["preempted"]):
        outcome = ran.outcomes[number]
        assert outcome.error is None, outcome.error
        assert outcome.saves["tokens"] == alone["tokens"]
        torch.testing.assert_close(outcome.saves["rows"], alone["rows"], rtol=1e-3, atol=1e-3)


@contextlib.contextmanager
def preempting_at(model: VLLM, num_tokens: int) -> Iterator[list[str]]:
    """Preempt each request once, when it has that many tokens; yield the ids of those preempted."""
    core: Any = model.engine.llm_engine.engine_core.engine_core
    schedule = core.scheduler.schedule
    done: list[str] = []

    def preempting_schedule(*args: Any, **kwargs: Any) -> Any:
        due = [r.request_id for r in core.scheduler.running if r.num_tokens == num_tokens]
        is_idle = not any(output.num_scheduled_tokens for _, output, _ in core.batch_queue)
        if is_idle and set(due) - set(done):
            done.extend(due)
            core.scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.scheduler, "schedule", preempting_schedule)
        yield done


@pytest.mark.parametrize("num_more", [-1, 0, 1, 2])
def test_a_request_that_returns_with_about_the_tokens_of_a_step_reads_once(
    model: VLLM, expected: dict[str, Any], num_more: int
) -> None:
    # An early stage has not received the last token of a request that is preempted.
    with preempting_at(model, OPTIONS["max_num_batched_tokens"] + num_more) as done:
        outcome = run_together(model, [generating(model, 0)]).outcomes[0]
    assert len(done) == 1
    assert outcome.error is None, outcome.error
    alone = expected["preempted"][0]
    assert outcome.saves["tokens"] == alone["tokens"]
    torch.testing.assert_close(outcome.saves["rows"], alone["rows"], rtol=1e-3, atol=1e-3)


def failing_in_a_sandbox(model: VLLM) -> dict[str, SentTrace]:
    """Return traces that end badly, or end their process, on either stage, by their errors."""
    opened = functools.partial(model.trace, PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY)
    held: dict[str, Any] = {}
    for layer in (1, 3):
        with opened() as held[f"KeyError {layer}"]:
            model.layers[layer].output.sum()
            raise KeyError("mine")
        with opened() as held[f"SandboxEndedError {layer}"]:
            model.layers[layer].output.sum()
            exec("import os; os._exit(0)")
    with opened() as held["TimeBudgetError or SandboxEndedError"]:
        model.layers[1].output.sum()
        while True:
            pass
    with opened() as held["StageError"]:
        model.model.layers[0].mlp(model.layers[3].output)
    with opened() as held["SandboxedError"]:
        model.model.layers[0].mlp(torch.ones(2, 7))
    return {name: tracer.sent for name, tracer in held.items()}


def test_sandboxed_blocks_that_fail_fail_alone(model: VLLM) -> None:
    with in_sandboxes(model):
        with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as idle:
            pass
        sent = failing_in_a_sandbox(model)
        # One by one: the traces of one tenant share the time that a step waits for them.
        errors = errors_beside(model, idle.sent, list(sent.values()), neighbours(), _MAX_STEPS)
    for expected, error in zip(sent, errors, strict=True):
        assert type(error).__name__ in expected.split()
    with in_sandboxes(model), model.trace(PROMPT, **GREEDY):
        token = model.samples.output.save()
    assert token.shape == (1, 1)


def test_an_aborted_request_leaves_nothing(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=60, tracer_cls=HeldTracer, **GREEDY) as held:
        for _ in held.iter[:]:
            model.layers[0].output
    assert run_and_abort(model, held.sent, num_tokens=7) == {"traced": 1, "traces": 1}
    assert not live_objects(model)


def test_what_cannot_come_is_named(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match=r"layers\.1"), model.trace(PROMPT):
        model.model.layers[1].mlp.output[:] = model.layers[3].output
    with pytest.raises(StageError, match=r"layers\.0\.mlp\.down_proj\.weight.*stage 0"), model.trace(PROMPT):
        model.model.layers[0].mlp.down_proj.weight.sum()
    with pytest.raises(StageError, match="parameters"), model.trace(PROMPT):
        list(model.model.layers[0].mlp.parameters())
    with pytest.raises(StageError, match=r"layers\.0\.mlp.*stage 0"), model.trace(PROMPT):
        model.model.layers[0].mlp(model.layers[3].output)
    with pytest.raises(StageError, match="got Fraction"), model.trace(PROMPT):
        model.model.layers[0].mlp(model.layers[0].output, Fraction(1, 2))
    with model.trace(PROMPT):
        early, errors = model.layers[0].output, save([])

        def other() -> None:
            try:
                model.model.layers[0].mlp(early)
            except StageError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1
    with pytest.raises(StageError, match="several pipeline stages"), model.trace(PROMPT):
        print(model.model.source)  # noqa: T201 - asking is enough
    with pytest.raises(RuntimeError, match="invalid for input of size"), model.trace(PROMPT):
        model.model.layers[1].mlp(model.layers[0].output[:, :3])
    with pytest.raises(SourceNotAvailableError), model.trace(PROMPT):
        print(model.model.layers[0].mlp.source.maybe_fused_act_quant_0.source)  # noqa: T201
    with pytest.raises(ValueError, match="hook=True"), model.trace(PROMPT):
        model.model.layers[1].mlp(model.layers[0].output, hook=True)
    with model.trace(PROMPT, **GREEDY):
        token = model.samples.output.save()
    assert token.shape == (1, 1)
