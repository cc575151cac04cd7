"""Blocks over two pipeline stages: the values, writes and errors of one stage, without effect on others."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from nnsight_engine import save
from nnsight_engine.envoys.source.definition import SourceNotAvailableError
from nnsight_engine.interleaving.events import MissedProviderError, OutOfOrderError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError, StageError
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.point_blocks import BLOCKS, PROMPT
from tests.e2e.sandboxed import in_sandboxes
from tests.e2e.traced_scenarios import (
    GREEDY,
    SCENARIOS,
    Scenario,
    Values,
    assert_an_abort_leaves_nothing,
    assert_each_fails_alone,
    assert_generated,
    assert_same,
    ending_its_process,
    failing_at,
    generated_alone,
    idle,
    named,
    neighbours,
    still_works,
)
from tests.e2e.traces import HeldTracer, run_together, traced_engine
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

LONG: Final = [7 + 3 * position % 250 for position in range(100)]
OPTIONS: Final[dict[str, Any]] = {
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 14,
    "limits": EngineLimits(trace_step_s=5.0, sandbox_step_s=10.0),
}
"""Steps of 64 tokens and little memory, so that prompts come in chunks and requests are preempted."""


# Layers 0 and 1 are on the first stage, 2 and 3 on the second. What each gives must not depend on that.


def every_module(model: VLLM) -> Values:
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


def operations(model: VLLM) -> Values:
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


def prompts_in_chunks(model: VLLM) -> Values:
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
    *SCENARIOS,
    prompts_in_chunks,
    BLOCKS["patch_between_invokes"],
    BLOCKS["look_through_a_lens"],
]
"""Scenarios that run in sandbox processes too."""
ALL: Final = [every_module, operations, *SANDBOXED, *(one for one in BLOCKS.values() if one not in SANDBOXED)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Any]:
    with traced_engine(checkpoint, **OPTIONS) as model:
        found: dict[str, Any] = {scenario.__name__: scenario(model) for scenario in ALL}
        return found | {"tree": repr(model), "generated": generated_alone(model, 6)}


@pytest.fixture(scope="module")
def model(checkpoint: Path, expected: dict[str, Any]) -> Iterator[VLLM]:
    """Start two stages, in processes of their own."""
    del expected  # the engine with one stage comes first, and has gone
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        with traced_engine(checkpoint, pipeline_parallel_size=2, **OPTIONS) as engine:
            yield engine


@pytest.mark.parametrize("scenario", ALL, ids=named)
def test_two_stages_do_what_one_does(model: VLLM, expected: dict[str, Any], scenario: Scenario) -> None:
    assert_same(scenario(model), expected[scenario.__name__])


@pytest.mark.parametrize("scenario", SANDBOXED, ids=named)
def test_sandboxed_blocks_do_on_two_stages_what_trusted_ones_do_on_one(
    model: VLLM, expected: dict[str, Any], scenario: Scenario
) -> None:
    with in_sandboxes(model):
        found = scenario(model)
    assert_same(found, expected[scenario.__name__])


def test_the_tree_shows_the_modules_of_all_stages(model: VLLM, expected: dict[str, Any]) -> None:
    assert repr(model) == expected["tree"]


@pytest.mark.parametrize("where", [contextlib.nullcontext, in_sandboxes], ids=["trusted", "sandboxed"])
def test_preempted_requests_read_once_and_write_again(
    model: VLLM, expected: dict[str, Any], where: Any
) -> None:
    with where(model):
        assert assert_generated(model, expected["generated"]).num_preempted > 0


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
        assert_generated(model, expected["generated"][:1])
    assert len(done) == 1


def calling_before_it_sleeps(model: VLLM) -> dict[str, SentTrace]:
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as tracer:
        while True:
            model.model.layers[0].mlp(model.layers[0].output)
            time.sleep(3600)
    return {"TimeBudgetError": tracer.sent}


def test_whoever_fails_fails_alone(model: VLLM) -> None:
    failing = failing_at(model, 1) | failing_at(model, 3) | calling_before_it_sleeps(model)
    assert_each_fails_alone(model, failing)


def test_who_writes_everywhere_disturbs_nobody(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as wild:
        seen = save([])
        for _ in wild.iter[:]:
            for layer in model.model.layers:
                layer.mlp.output[:] += torch.randn(128)
            seen.append(model.samples.output.item())
    calm, ran = (run_together(model, [one], neighbours(), late=1) for one in (idle(model), wild.sent))
    for number in range(len(neighbours())):
        assert ran.logprobs(f"plain-{number}") == calm.logprobs(f"plain-{number}")
    assert ran.outcomes[0].saves["seen"] == ran.tokens("trace-0") != calm.tokens("trace-0")


def calling_what_is_not_there(model: VLLM) -> dict[str, SentTrace]:
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as passed:
        model.model.layers[0].mlp(model.layers[3].output)
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as misshapen:
        model.model.layers[0].mlp(torch.ones(2, 7))
    return {"StageError": passed.sent, "SandboxedError": misshapen.sent}


def test_sandboxed_blocks_that_fail_fail_alone(model: VLLM) -> None:
    with in_sandboxes(model):
        failing = failing_at(model, 1) | ending_its_process(model, 1) | ending_its_process(model, 3)
        assert_each_fails_alone(model, failing | calling_what_is_not_there(model), at_once=False)


def test_an_aborted_request_leaves_nothing(model: VLLM) -> None:
    assert_an_abort_leaves_nothing(model, {"traced": 1, "traces": 1})


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
        width = save(model.model.layers[0].mlp.down_proj.input_size)
    assert width == 192
    assert still_works(model)
