"""Five hundred requests of all kinds in one small engine: what each gets is what it gets alone.

Memory is short, so requests are preempted. Steps are short, so prompts come in chunks. Requests join and are
aborted at any step. Everything is float32, where the order of additions in a larger batch moves a value by
some 1e-6, so values are compared to 1e-4 of the largest. A token could flip only where the best two are as
close as that: definitions whose solo run comes within 1e-3 of a tie are left out, and the rest of the tokens
must be equal.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import save
from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.serialization import DecodeError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError, TraceBytesError
from nnsight_engine.vllm_backend.traces.request import TracedRequest
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.harness import Ask, random_vector
from tests.e2e.mixed_load import DECLARATIVE, KINDS, PLAIN, TRACED, Answer, Definition, Load, difference
from tests.e2e.soak_blocks import MAKERS, WIDTH
from tests.e2e.traces import HeldTracer, Plain, run_together, traced_engine
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_STEP: Final = 64
_NUM_REQUESTS: Final = 500
_TOLERANCE: Final = 1e-4
_NEAR_TIE: Final = 1e-3
_VARIANTS: Final = 3
_NUM_SPARE: Final = 8
"""Threads that wait for another block, at the most."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    """Start an engine with steps of 64 tokens, memory for 20 blocks of 32, and a MiB for each block."""
    options = {
        "limits": EngineLimits(max_trace_bytes=1024 * 1024),
        "max_num_batched_tokens": _STEP,
        "max_num_seqs": 16,
        "block_size": 32,
        "num_gpu_blocks_override": 20,
    }
    checkpoint = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    num_threads = torch.get_num_threads()
    with traced_engine(checkpoint, max_model_len=192, **options) as model:
        torch.set_num_threads(1)  # the model is too small for two, and other tests may have the other core
        yield model
    torch.set_num_threads(num_threads)


def prompt(choices: random.Random, *, longest: int) -> list[int]:
    return [choices.randrange(1, 280) for _ in range(choices.randrange(4, longest))]


def definitions(model: VLLM) -> list[Definition]:
    """Return each kind of block over prompts short and long, plain requests and declarative ones."""
    choices = random.Random(0)
    found = []
    for name, maker in MAKERS.items():
        for number in range(_VARIANTS):
            ids = prompt(choices, longest=110 if number and maker.fits_all else 40)
            label = f"{name} {number}, {len(ids)} tokens"
            found.append(Definition(label, TRACED, open=partial(maker.sent, model, ids, number)))
    steer = {"op": "steer", "at": "layers.1.output", "vector": random_vector(1, WIDTH), "scale": 0.5}
    capture = {"op": "capture", "at": ["layers.2.output"], "name": "c"}
    for number in range(24):
        ids, tokens = prompt(choices, longest=110), choices.randrange(4, 60)
        sampling = {"logprobs": 2}
        found.append(Definition(f"plain {number}", PLAIN, Ask(ids, [], tokens, sampling)))
        if number % 2:
            ask = Ask(ids, [steer, capture] if number % 4 == 1 else [capture], tokens, sampling)
            found.append(Definition(f"declarative {number}", DECLARATIVE, ask))
    return found


def is_chunked_error(answer: Answer) -> bool:
    return answer.error is not None and issubclass(answer.error[0], ChunkedPromptError)


def live_bytes() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum(one.untyped_storage().nbytes() for one in tensors)


def block_threads() -> set[threading.Thread]:
    """Return the threads of blocks, those of other engines in this process included."""
    return {one for one in threading.enumerate() if one.name.startswith("nnsight-engine-block")}


def test_all_requests_get_the_same_as_alone_and_nothing_is_left(model: VLLM) -> None:
    threads_before = block_threads()
    load = Load(model)
    alone = {one: load.alone(one) for one in definitions(model)}
    for definition, answer in alone.items():
        if definition.kind == TRACED:
            name, _, rest = definition.name.partition(" ")
            is_long = int(rest.split()[1]) > _STEP
            assert is_chunked_error(answer) == (is_long and not MAKERS[name].over_chunks), (
                definition,
                answer,
            )
    clear = [one for one in alone if alone[one].gap > _NEAR_TIE]
    assert len(clear) > len(alone) * 0.9
    by_kind = {kind: [one for one in clear if one.kind == kind] for kind in (TRACED, PLAIN, DECLARATIVE)}

    choices = random.Random(1)
    wrong: list[str] = []

    def answered(definition: Definition, answer: Answer) -> None:
        wanted = alone[definition]
        if is_chunked_error(wanted):
            same = is_chunked_error(answer)
        elif wanted.error is not None:
            same = answer.error == wanted.error
        else:
            same = answer.error is None and not difference(wanted.values, answer.values, _TOLERANCE)
        if not same:
            how = difference(wanted.values, answer.values, _TOLERANCE)
            wrong.append(f"{definition.name}: {wanted.error} and {answer.error}: {how}")

    def half(num_requests: int) -> int:
        kinds = choices.choices([TRACED, PLAIN, DECLARATIVE], weights=[3, 4, 2], k=num_requests)
        drawn = [choices.choice(by_kind[kind]) for kind in kinds]
        load.run(drawn, choices, answered, at_once=20, abort_one_in=12)
        assert set(load.engine.held().values()) == {0}
        return live_bytes()

    after_first = half(_NUM_REQUESTS // 2)
    after_second = half(_NUM_REQUESTS - _NUM_REQUESTS // 2)
    assert not wrong, "\n".join(wrong)
    happened: Any = load.happened
    for what in (happened.preempted, happened.chunked, happened.aborted):
        assert all(what[kind] for kind in KINDS), happened
    assert after_second <= after_first + 64 * 1024
    assert not [one for one in gc.get_objects() if isinstance(one, TracedRequest)]
    assert len(block_threads() - threads_before) <= _NUM_SPARE
    assert not load.scheduler.requests
    pool = load.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is the null block


ONE: Final = list(range(10, 40))
OTHER: Final = list(range(100, 120))
LONG: Final = list(range(100, 200))
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}


def zeroed(model: VLLM, at: str) -> Any:
    with model.trace(ONE, **GREEDY):
        model.points[at][:] = 0
        logits = model.logits.output.save()
    return logits


@pytest.mark.parametrize("at", ["layers.1.output", "layers.1.mlp.output"])
def test_an_edit_after_a_barrier_reaches_the_model_though_others_were_served_in_between(
    model: VLLM, at: str
) -> None:
    alone = zeroed(model, at)
    with model.trace(OTHER, **GREEDY):
        model.points[at][:] *= 3
        tripled = model.logits.output.save()
    with model.trace(**GREEDY) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ONE):
            value = model.points[at]
            barrier()
            value[:] = 0
            first = model.logits.output.save()
        with tracer.invoke(OTHER):
            own = model.points[at]
            own[:] *= 3
            barrier()
            second = model.logits.output.save()
    torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, tripled, rtol=1e-4, atol=1e-4)


def test_a_place_of_a_prompt_in_chunks_may_be_read_twice_and_not_edited_later(model: VLLM) -> None:
    with model.trace(LONG, **GREEDY):
        first = model.layers[1].attn.q.save()
        second = model.layers[1].attn.v.save()
    assert len(first) == len(second) == len(LONG)
    with pytest.raises(ChunkedPromptError, match=r"layers\.1\.mlp"):
        with model.trace(LONG, **GREEDY):
            output = model.layers[1].mlp.output
            model.layers[1].mlp.output = output * 2
    with pytest.raises(ValueError, match="100 positions"):
        with model.trace(LONG, **GREEDY):
            model.model.layers[1].mlp.output = torch.zeros(110, WIDTH)


def test_only_the_request_that_holds_too_much_gets_an_error(model: VLLM) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    neighbour = Plain("I think dogs are good and", greedy)
    calm = run_together(model, [], [neighbour])
    names = [name for name in model.points() if not name.endswith("pattern")]
    with model.trace(LONG[:60], tracer_cls=HeldTracer, **GREEDY) as saving:
        everything = save({})
        for name in names:
            everything[name] = model.points[name]
    with model.trace(LONG[:60], tracer_cls=HeldTracer, **GREEDY) as writing:
        for layer in model.layers:
            layer.attn.q[:] *= 1.01
            layer.attn.heads[:] *= 1.01
            layer.mlp.up[:] *= 1.01
            layer.mlp.act[:] *= 1.01
            layer.output[:] *= 1.01
    with model.trace(ONE, tracer_cls=HeldTracer, **GREEDY) as growing:
        much = save([])
        much.append(model.layers[0].output.repeat(100, 1))
    with model.trace(LONG[:60], tracer_cls=HeldTracer, **GREEDY) as little:
        last = save([layer.output[-1].clone() for layer in model.layers])  # noqa: F841 - fetched by name
    sent = [tracer.sent for tracer in (saving, writing, growing, little)]
    ran = run_together(model, sent, [neighbour])
    for number in range(3):
        error = ran.outcomes[number].error
        assert isinstance(error, TraceBytesError), (number, error)
        assert "1048576" in str(error)
        assert "max_trace_bytes" in str(error)
        assert not ran.outcomes[number].saves
    assert ran.outcomes[3].error is None
    assert len(ran.outcomes[3].saves["last"]) == len(model.layers)
    assert ran.tokens("plain-0") == calm.tokens("plain-0")


@pytest.mark.parametrize(
    "change",
    [
        {"data": b"no message"},
        {"data": b""},
        {"index": 7},
        {"index": -1},
        {"index": "one"},
        {"num_choices": 3},
        {"groups": []},
        {"key": None},
        None,
    ],
)
def test_what_is_no_trace_ends_its_own_request(model: VLLM, change: dict[str, Any] | None) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with model.trace(ONE, max_tokens=4, tracer_cls=HeldTracer, **GREEDY) as tracer:
        model.layers[1].output.save()
    sent = tracer.sent
    (params,) = sent.params
    assert params.extra_args is not None
    entry = params.extra_args[TRACE_KEY]
    params.extra_args[TRACE_KEY] = "nothing" if change is None else {**entry, **change}
    ran = run_together(model, [sent], [Plain("I think dogs are", greedy)])
    assert len(ran.tokens("plain-0")) == 4
    assert ran.outputs["trace-0"].finished
    with pytest.raises((LostTraceError, DecodeError, IndexError, ValueError)):
        sent.assign_saved(list(ran.outcomes.values()))
