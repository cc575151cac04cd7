"""Blocks inside the serving engine: reads, writes and saves, on the narrow model in float32."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.interleaving.events import MissedProviderError, OutOfOrderError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.traced_scenarios import assert_an_abort_leaves_nothing, assert_failed_as, failing_at
from tests.e2e.traces import HeldTracer, Plain, run_together, traced_engine
from tests.narrow_model import NEXT, PROMPT, WIDTH
from tests.shared_names import Program

pytestmark = pytest.mark.e2e

GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def model(narrow: Path) -> Iterator[VLLM]:
    with traced_engine(narrow, max_num_seqs=32, limits=EngineLimits(trace_step_s=5.0)) as model:
        yield model


@pytest.fixture(scope="module")
def hidden(reference: Any, model: VLLM) -> tuple[torch.Tensor, ...]:
    ids = torch.tensor([model.tokenizer.encode(PROMPT)])
    with torch.no_grad():
        states = reference(ids, output_hidden_states=True)
    return (*states.hidden_states, states.logits)


def plain_tokens(model: VLLM, prompt: str, max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    (output,) = model.engine.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_values_are_the_models(model: VLLM, hidden: tuple[torch.Tensor, ...]) -> None:
    with model.trace(PROMPT, **GREEDY):
        embedded = model.model.embed_tokens.output.save()
        pair = model.model.layers[9].output.save()
        logits = model.logits.output.save()
        token = model.samples.output.save()
    torch.testing.assert_close(embedded, hidden[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pair[0] + pair[1], hidden[10][0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits[0], hidden[-1][0, -1], rtol=1e-3, atol=1e-3)
    assert token.tolist() == [[int(logits.argmax())]]
    assert model.tokenizer.decode(token[0]) == NEXT


def test_every_step_of_a_generation(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=6, **GREEDY) as tracer:
        shapes = save([])
        tokens = save([])
        for step in tracer.iter[:]:
            shapes.append((step, tuple(model.model.norm.output[0].shape)))
            tokens.append(model.samples.output.item())
        result = tracer.result.save()
    num_tokens = len(model.tokenizer.encode(PROMPT))
    assert shapes == [(0, (num_tokens, WIDTH)), *((step, (1, WIDTH)) for step in range(1, 6))]
    assert tokens == plain_tokens(model, PROMPT, 6) == list(result.outputs[0].token_ids)


def test_writes_reach_the_model_and_nothing_else(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        kept = save([])
        for _ in tracer.iter[:]:
            model.model.layers[3].mlp.output[:] = 0
            kept.append(model.model.layers[3].output[0].abs().max().item())
            model.logits.output = torch.nn.functional.one_hot(torch.tensor([42]), 49152).float() * 100
        tokens = tracer.result.save()
    assert kept == [0.0] * 4
    assert list(tokens.outputs[0].token_ids) == [42] * 4
    with model.trace(PROMPT, **GREEDY):
        model.samples.output = torch.tensor([[7]])
    assert plain_tokens(model, PROMPT, 4) == plain_tokens(model, PROMPT, 4)


@pytest.mark.parametrize(
    ("place", "number", "why"),
    [
        ("samples.output", 10**9, "takes integers from 0 to 49151"),
        ("model.embed_tokens.input", 49152, "takes integers from 0 to 49151"),
        ("model.embed_tokens.input", -1, "takes integers from 0 to 49151"),
        ("model.layers.0.self_attn.rotary_emb.input", 2**40, "integers that vLLM's kernels trust"),
        ("model.layers.0.input", 0, "integers that vLLM's kernels trust"),
    ],
)
def test_integers_out_of_range_do_not_reach_the_kernels(
    model: VLLM, place: str, number: int, why: str
) -> None:
    before = plain_tokens(model, PROMPT, 3)
    path, _, side = place.rpartition(".")
    with pytest.raises(ValueError, match=why):
        with model.trace(PROMPT, max_tokens=3, **GREEDY):
            getattr(model.get(f"{model.path}.{path}"), side)[:] = number
    assert plain_tokens(model, PROMPT, 3) == before


def test_a_prompts_tokens_can_be_replaced(model: VLLM) -> None:
    other = torch.tensor(model.tokenizer.encode("The Colosseum is in the city of"))
    prompt = [int(other[0])] * len(other)
    with model.trace(prompt, **GREEDY):
        model.model.embed_tokens.input = other
        patched = model.logits.output.save()
    with model.trace(other.tolist(), **GREEDY):
        logits = model.logits.output.save()
    torch.testing.assert_close(patched, logits, rtol=1e-4, atol=1e-4)


def test_operations_inside_a_forward(model: VLLM) -> None:
    with model.trace(PROMPT, **GREEDY):
        gate_up = model.model.layers[2].mlp.source.self_gate_up_proj_0.output.save()
        down = model.model.layers[2].mlp.source.self_down_proj_0.input.save()
    gate, up = gate_up[0].chunk(2, dim=-1)
    torch.testing.assert_close(down, torch.nn.functional.silu(gate) * up)


def test_custom_modules_and_functions_are_sent(model: VLLM) -> None:
    torch.manual_seed(0)
    decode = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU())

    def largest(value: torch.Tensor) -> torch.Tensor:
        return value.argmax(-1)

    with model.trace(PROMPT, **GREEDY):
        value = model.model.layers[6].mlp.output.save()
        found = save(largest(decode.to(value.device)(value)))
    assert torch.equal(found, largest(decode(value)))


def test_an_error_is_the_users_own(model: VLLM) -> None:
    with pytest.raises(RuntimeError, match="size mismatch") as caught, model.trace(PROMPT):
        value = model.model.layers[3].mlp.output
        value @ torch.ones(3, device=value.device)  # the line
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any(line is not None and "# the line" in line for line in lines)
    assert all(
        "nnsight_engine" not in (frame.filename or "")
        for frame in traceback.extract_tb(caught.value.__traceback__)
    )


def test_what_does_not_come_is_named(model: VLLM) -> None:
    with pytest.raises(MissedProviderError, match="apply_rotary_emb"), model.trace(PROMPT):
        model.model.layers[0].self_attn.rotary_emb.apply_rotary_emb.output.save()
    with pytest.raises(OutOfOrderError, match=r"layers\.2"), model.trace(PROMPT):
        model.model.layers[5].output.save()
        model.model.layers[2].output.save()


def failing(model: VLLM) -> dict[str, SentTrace]:
    """Return traces that end badly, each in its own way, by the names of their errors."""
    options: dict[str, Any] = {"max_tokens": 8, "tracer_cls": HeldTracer, **GREEDY}
    held: dict[str, Any] = {}
    with model.trace(PROMPT, **options) as held["TimeBudgetError asleep"]:
        model.model.layers[1].output
        time.sleep(3600)
    with model.trace(PROMPT, **options) as held["SystemExit"]:
        model.model.layers[1].output
        raise SystemExit
    with model.trace(PROMPT, **options) as held["OutOfOrderError"]:
        model.model.layers[1].output
        while True:
            try:  # noqa: SIM105 - as stubborn code does
                model.model.layers[0].output
            except Exception:  # noqa: BLE001 - the same
                pass
    with model.trace(PROMPT, **options) as held["EncodeError"]:
        handle = save(open("/dev/null"))  # noqa: F841, SIM115 - saved, and does not travel
    return failing_at(model, 1) | {name: tracer.sent for name, tracer in held.items()}


def test_whoever_fails_fails_alone(model: VLLM) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    plain = [Plain(f"Neighbour {number} says that", greedy) for number in range(7)]
    quiet = run_together(model, [], plain)
    with model.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as well:
        tokens = save([])
        for _ in well.iter[:]:
            tokens.append(model.samples.output.item())
    held = failing(model)
    ran = run_together(model, [well.sent, *held.values()], plain, late=2)
    for number in range(len(plain)):
        assert ran.tokens(f"plain-{number}") == quiet.tokens(f"plain-{number}")
    assert ran.outcomes[0].saves["tokens"] == plain_tokens(model, PROMPT, 8)
    for number, name in enumerate(held, 1):
        assert_failed_as(name, ran.outcomes[number])


def test_a_trace_in_a_block_fails_that_block_alone(model: VLLM) -> None:
    with pytest.raises(RuntimeError, match=r"trace\(\) cannot be called in a block"):
        with model.trace(PROMPT, max_tokens=3):
            with model.trace(PROMPT):
                model.model.layers[0].output.save()
    with pytest.raises(RuntimeError, match=r"trace\(\) cannot be called in a block"):
        with model.trace(PROMPT, max_tokens=3):
            with model.model.layers[0].trace(torch.ones(1, 4)):
                model.model.layers[0].output.save()
    with pytest.raises(RuntimeError, match=r"scan\(\) cannot be called in a block"):
        with model.trace(PROMPT, max_tokens=3):
            with model.scan(PROMPT):
                model.model.layers[0].output.save()
    with pytest.raises(RuntimeError, match=r"edit\(\) cannot be called in a block"):
        with model.trace(PROMPT, max_tokens=3):
            with model.edit(inplace=True):
                model.model.layers[0].output[:] = 0
    with pytest.raises(RuntimeError, match=r"interleave\(\) cannot be called in a block"):
        with model.trace(PROMPT, max_tokens=3):
            model.interleave(len, "x")
    with model.trace(PROMPT, max_tokens=1):
        after = model.layers[0].output.save()
    assert after.shape[-1] > 4


def test_neighbours_notice_nothing(model: VLLM) -> None:
    prompts = [f"Neighbour {number} says that" for number in range(7)]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    neighbours = [Plain(prompt, drawn if at % 2 else greedy) for at, prompt in enumerate(prompts)]
    with model.trace(PROMPT, max_tokens=10, tracer_cls=HeldTracer, **GREEDY) as held:
        for _ in held.iter[:]:
            for layer in model.model.layers:
                output = layer.mlp.output
                output[:] += torch.randn_like(output)
    with model.trace(PROMPT, max_tokens=10, tracer_cls=HeldTracer, **GREEDY) as idle:
        pass
    calm = run_together(model, [idle.sent], neighbours, late=1)
    wild = run_together(model, [held.sent], neighbours, late=1)
    for number in range(7):
        assert wild.tokens(f"plain-{number}") == calm.tokens(f"plain-{number}")
    assert wild.outcomes[0].error is None
    assert wild.tokens("trace-0") != calm.tokens("trace-0")


def test_what_is_drawn_at_random_is_the_traces_own(model: VLLM) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with model.trace(PROMPT, **GREEDY):
        drawn = save(torch.randn(3))
    assert drawn.shape == (3,)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_aborted_request_leaves_nothing(model: VLLM) -> None:
    assert_an_abort_leaves_nothing(model, {"traced": 1, "traces": 1})


def test_what_is_wrong_is_said_before_anything_runs(model: VLLM) -> None:
    with pytest.raises(ValueError, match="one prompt, got 2"), model.trace(["a", "b"]):
        pass
    with pytest.raises(ValueError, match="needs a prompt"), model.trace() as tracer, tracer.invoke():
        pass
    with pytest.raises(TypeError, match="top_q"), model.trace("a", top_q=3):
        pass
    lock = open("/dev/null")  # noqa: SIM115 - closed below
    with pytest.raises(ValueError, match="lock"), lock, model.trace("a"):
        save(lock)


def test_several_invokes_with_several_choices_come_to_an_end(model: VLLM) -> None:
    with model.trace(max_tokens=2, n=2, temperature=1.0, seed=1, ignore_eos=True) as tracer:
        with tracer.invoke("a b c"):
            first = model.model.norm.output[0].save()
        with tracer.invoke("d e"):
            second = model.model.norm.output[0].save()
            noise = save(torch.rand(2))
    assert [one.shape for one in first] == [first[0].shape] * 2
    assert [one.shape for one in second] == [second[0].shape] * 2
    assert not torch.equal(noise[0], noise[1]), "each choice draws its own"


class Own(torch.Tensor):
    """A tensor with a say in what is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("nobody asks this in the model")


@pytest.mark.parametrize("how", ["meta", "sparse", "subclass"])
def test_a_value_that_is_none_fails_its_own_request_alone(model: VLLM, how: str) -> None:
    expected = plain_tokens(model, PROMPT, 3)
    num_tokens = len(model.tokenizer.encode(PROMPT))
    is_refused = how != "subclass"
    with pytest.raises(ValueError, match="cannot take the place") if is_refused else contextlib.nullcontext():
        with model.trace(PROMPT, **GREEDY):
            value = torch.zeros(num_tokens, WIDTH)
            if how == "subclass":
                value = value.as_subclass(Own)
            else:
                value = value.to_sparse() if how == "sparse" else value.to("meta")
            model.model.layers[3].mlp.skip(value)
            model.logits.output.save()
    assert plain_tokens(model, PROMPT, 3) == expected


def test_a_module_is_called_for_the_block_alone(model: VLLM) -> None:
    with pytest.raises(ValueError, match="hook=True"), model.trace(PROMPT, **GREEDY):
        hidden = model.model.layers[3].mlp.output
        model.model.layers[4].mlp(hidden, hook=True).save()


def test_a_session_passes_values_on_unsaved(model: VLLM) -> None:
    with model.session():
        with model.trace(PROMPT, **GREEDY):
            unused = model.layers[3].output
            hidden = model.layers[9].output[-1]
        with model.trace("Rome", **GREEDY):
            model.layers[9].output[-1] = hidden
            patched = model.layers[9].output[-1].save()
    with model.trace(PROMPT, **GREEDY):
        alone = model.layers[9].output[-1].save()
    assert torch.equal(patched, alone)
    with pytest.raises(NameError):
        _ = hidden, unused


def test_random_programs_with_names_in_common_read_what_they_would_one_by_one(model: VLLM) -> None:
    places = [f"model.model.layers[{number}]" for number in range(2, 30, 4)]
    num_passed_on = 0
    for seed in range(10):
        program = Program(3000 + seed, places, sent=True)
        num_passed_on += program.check(program.traced(model, PROMPT, **GREEDY))
    assert num_passed_on > 5


def test_a_value_left_over_is_never_taken_for_one_that_comes_later(model: VLLM) -> None:
    clean = torch.zeros(WIDTH)
    with pytest.raises(NameError, match="clean") as caught, model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            clean = model.model.layers[9].mlp.output
        with tracer.invoke(PROMPT):
            model.model.layers[9].mlp.output = clean
    assert "tracer.barrier(2)" in caught.value.__notes__[0]


def test_values_that_are_not_finite_stay_with_their_block(model: VLLM) -> None:
    expected = plain_tokens(model, PROMPT, 20)
    for name in ("self_attn.qkv_proj", "mlp.down_proj"):
        with model.trace("Rome is in " * 20, max_tokens=20, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                model.get(f"model.layers.4.{name}").output[0][:] = float("nan")
        assert plain_tokens(model, PROMPT, 20) == expected
