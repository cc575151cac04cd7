"""LoRA adapters with interventions: as transformers with the adapter merged, whoever else is in the batch.

Engines in float32 serve the module, with one worker, two ranks, and two stages: a tiny Llama with two random
adapters of all its projections.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import torch
from vllm.lora.request import LoRARequest

from api_schemas.errors import ApiError
from nnsight_engine import LanguageModel, save
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.adapted import (
    BASE,
    BLOCK_SIZE,
    BROKEN,
    CONTEXT,
    FIRST,
    SECOND,
    UNREADABLE,
    Adapted,
    adapted,
    expected,
    head_adapter,
    write_broken,
)
from tests.e2e.engine_kinds import options_of_process
from tests.e2e.family_check import CHECKS, PROMPT_IDS, Expected
from tests.e2e.harness import Ask, Engine, Reply, random_vector
from tests.e2e.point_blocks import BLOCKS, AdaptedVLLM, Values, difference, expected_values, tried
from tests.families.adapters import RANK, write_adapter, write_merged
from tests.families.checkpoints import HIDDEN_SIZE
from tests.families.edits import continued
from tests.families.reference import load_reference_model, reference_activations

__all__ = ["adapted", "expected"]  # fixtures

pytestmark = pytest.mark.e2e

_ENGINE: Final[dict[str, Any]] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 128,
    "block_size": BLOCK_SIZE,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
}
_LONG: Final = PROMPT_IDS * 6
"""A prompt of several blocks of the KV cache."""
_LOGPROBS: Final = {"logprobs": 5}
_CAPTURED: Final = ["layers.0.mlp.output", "layers.2.attn.q", "layers.2.mlp.act", "layers.3.output"]
_Value = TypeVar("_Value")


@pytest.fixture(scope="module")
def requests(adapted: Adapted) -> dict[str, LoRARequest | None]:
    """Return by name what asks for an adapter, and None for the checkpoint as it is."""
    named = enumerate(adapted.adapters.items(), 1)
    return {BASE: None} | {name: LoRARequest(name, number, str(one)) for number, (name, one) in named}


@pytest.fixture(scope="module")
def values(adapted: Adapted) -> dict[str, Values | str]:
    return expected_values(adapted.merged[FIRST])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="one worker"),
        pytest.param({"tensor_parallel_size": 2}, id="two ranks", marks=pytest.mark.heavy),
        pytest.param({"pipeline_parallel_size": 2}, id="two stages", marks=pytest.mark.heavy),
    ],
)
def workers(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    chosen: dict[str, int] = request.param
    with pytest.MonkeyPatch.context() as patch:
        if chosen:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            patch.setenv("OMP_NUM_THREADS", "1")
        yield chosen


@pytest.fixture(scope="module")
def model(
    workers: dict[str, int],
    adapted: Adapted,
    requests: dict[str, LoRARequest | None],
    expected: dict[str, Expected],
    values: dict[str, Values | str],
) -> Iterator[AdaptedVLLM]:
    """Start the engine, after transformers has computed what it is compared with."""
    options = {**_ENGINE, **options_of_process(adapted.base), **workers}
    model = AdaptedVLLM(str(adapted.base), dispatch=True, **options)
    model.__dict__["adapter"] = requests[FIRST]
    yield model
    model.shutdown()


@pytest.fixture(scope="module")
def engine(model: AdaptedVLLM) -> Engine:
    return Engine.around(model.engine)


# Against transformers.


def offered(expected: Expected, engine: Engine) -> Expected:
    """Return what is expected at the points that operations may name; with two ranks not at all."""

    def known(values: Mapping[str, _Value]) -> dict[str, _Value]:
        leaves = {point: re.sub(r"^layers\.\d+\.", "", point) for point in values}
        return {point: value for point, value in values.items() if engine.spec.leaf(leaves[point])}

    return dataclasses.replace(
        expected, activations=known(expected.activations), written=known(expected.written)
    )


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [FIRST, BASE])
def test_an_adapter_gives_what_the_merged_weights_give(
    engine: Engine,
    requests: dict[str, LoRARequest | None],
    expected: dict[str, Expected],
    name: str,
    check: str,
) -> None:
    engine.adapter = requests[name]
    try:
        CHECKS[check](engine, offered(expected[name], engine))
    finally:
        engine.adapter = None


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_sees_and_calls_the_adapted_model(
    model: AdaptedVLLM, values: dict[str, Values | str], block: str
) -> None:
    failure = difference(values[block], tried(BLOCKS[block], model))
    assert failure is None, failure


# In one batch.


def _captured(engine: Engine) -> list[str]:
    return [point for point in _CAPTURED if engine.spec.leaf(point.partition(".")[2].partition(".")[2])]


def _steer(engine: Engine, seed: int) -> list[dict[str, Any]]:
    vector = random_vector(seed, HIDDEN_SIZE)
    return [
        {"op": "steer", "at": "layers.1.output", "vector": vector, "scale": 2},
        {"op": "capture", "at": _captured(engine), "name": "captured"},
    ]


def _ask(number: int, adapter: LoRARequest | None, interventions: list[dict[str, Any]]) -> Ask:
    return Ask([*PROMPT_IDS, number], interventions, sampling=dict(_LOGPROBS), adapter=adapter)


def _assert_equal(one: Reply, other: Reply, captured: list[str]) -> None:
    assert (one.failure, one.token_ids) == (None, other.token_ids)
    assert one.logprobs == other.logprobs
    for point in captured if one.collected is not None else ():
        assert torch.equal(one.tensor("captured", point), other.tensor("captured", point)), point


def test_each_request_of_a_mixed_batch_is_as_among_plain_requests(
    engine: Engine, requests: dict[str, LoRARequest | None]
) -> None:
    names = [FIRST, BASE, SECOND, FIRST, BASE, SECOND, BASE]
    asks = [
        _ask(number, requests[name], _steer(engine, number) if number > 2 else [])
        for number, name in enumerate(names)
    ]
    together = [reply for (reply,) in engine.run(asks)]
    for number, (ask, reply) in enumerate(zip(asks, together, strict=True)):
        # As many rows in each step: with other numbers of rows, the last bits of products may differ.
        plain = [_ask(other, None, []) if other != number else ask for other in range(len(asks))]
        _assert_equal(reply, engine.run(plain)[number][0], _captured(engine))
        ((alone,),) = engine.run([ask])
        assert alone.token_ids == reply.token_ids
    assert len({tuple(reply.token_ids) for reply in together}) > len(set(names))


def test_more_adapters_than_slots_take_turns(
    engine: Engine, requests: dict[str, LoRARequest | None], adapted: Adapted, tmp_path: Path
) -> None:
    third = LoRARequest("third", 3, str(write_adapter(adapted.base, tmp_path / "third", seed=3)))
    adapters = [requests[FIRST], None, third, requests[SECOND], third]
    asks = [_ask(number, adapter, _steer(engine, number)) for number, adapter in enumerate(adapters)]
    together = [reply for (reply,) in engine.run(asks)]
    for ask, reply in zip(asks, together, strict=True):
        ((alone,),) = engine.run([ask])
        assert (reply.failure, reply.token_ids) == (None, alone.token_ids)
        for point in _captured(engine):
            ours, own = reply.tensor("captured", point), alone.tensor("captured", point)
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_logprobs_of_an_adapted_prompt(engine: Engine, requests: dict[str, LoRARequest | None]) -> None:
    """The unembedding of many rows uses no request's adapter."""
    sampling = {"prompt_logprobs": 0}
    with_it = [
        Ask(PROMPT_IDS, _steer(engine, number), sampling=sampling, adapter=requests[name])
        for number, name in enumerate((FIRST, SECOND, BASE))
    ]
    replies = [reply for (reply,) in engine.run(with_it)]
    assert all(reply.failure is None for reply in replies)


# The prefix cache.


@pytest.mark.parametrize("num_writes", [0, 1], ids=["plain", "steered"])
def test_adapters_never_share_the_prefix_cache(
    engine: Engine, requests: dict[str, LoRARequest | None], num_writes: int
) -> None:
    prompt = [*_LONG, 100 + num_writes]
    only_writes = _steer(engine, 1)[:num_writes]
    cold = {}
    for name, adapter in requests.items():
        cold[name] = engine.ask(prompt, only_writes, sampling=dict(_LOGPROBS), adapter=adapter)
        assert cold[name].num_cached_tokens == 0, name
    for name, adapter in requests.items():
        warm = engine.ask(prompt, only_writes, sampling=dict(_LOGPROBS), adapter=adapter)
        assert warm.num_cached_tokens >= 64, name
        assert warm.token_ids == cold[name].token_ids
    assert len({tuple(reply.token_ids) for reply in cold.values()}) == len(requests)


# Blocks that call modules.


def test_a_block_calls_modules_with_its_own_requests_adapter(
    model: AdaptedVLLM,
    workers: dict[str, int],
    adapted: Adapted,
    requests: dict[str, LoRARequest | None],
) -> None:
    """Whatever the number of rows and whoever else is in the batch; on an early stage while it runs."""
    waits = "pipeline_parallel_size" in workers
    rows = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    greedy: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    with model.trace(**greedy) as tracer:
        with tracer.invoke(PROMPT_IDS, lora_request=requests[FIRST]):
            if waits:
                _ = model.layers[0].output
            of_first = save([model.layers[1].mlp(rows), model.model.layers[0].self_attn.qkv_proj(rows)[0]])
        with tracer.invoke(PROMPT_IDS[1:], lora_request=requests[SECOND]):
            _ = model.layers[1].output
            of_second = save([model.layers[1].mlp(rows), model.model.layers[0].self_attn.qkv_proj(rows)[0]])
        with tracer.invoke(PROMPT_IDS[2:]):
            for _ in tracer.iter[:]:
                if waits:
                    _ = model.layers[0].output
                of_base = save([model.layers[1].mlp(rows), model.model.layers[0].self_attn.qkv_proj(rows)[0]])
    for name, got in ((FIRST, of_first), (SECOND, of_second), (BASE, of_base)):
        wanted = _called(adapted.merged[name], rows)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _called(merged: Path, rows: torch.Tensor) -> list[torch.Tensor]:
    local: Any = LanguageModel(str(merged), dtype=torch.float32, dispatch=True)._module
    attention = local.model.layers[0].self_attn
    with torch.no_grad():
        projected = [getattr(attention, f"{part}_proj")(rows) for part in "qkv"]
        return [local.model.layers[1].mlp(rows), torch.cat(projected, dim=-1)]


# What is refused.


def test_an_adapter_of_the_unembedding_is_refused_by_every_worker(
    engine: Engine, adapted: Adapted, tmp_path: Path
) -> None:
    for folder, refused in ((head_adapter(tmp_path), True), (adapted.adapters[FIRST], False)):
        found = engine.llm.collective_rpc("load_adapter", args=("another", 9, str(folder)))
        assert [one is not None and "lm_head" in one for one in found] == [refused] * len(found)


@pytest.mark.parametrize("kind", BROKEN)
def test_an_adapter_is_checked_as_a_whole(
    engine: Engine, adapted: Adapted, kind: str, tmp_path: Path
) -> None:
    reason = write_broken(adapted.adapters[FIRST], kind, tmp_path)
    found = engine.llm.collective_rpc("load_adapter", args=("broken", 10, str(tmp_path)))
    engine.llm.collective_rpc("remove_lora", args=(10,))
    assert any(one is not None and re.search(reason, one) for one in found), found


@pytest.mark.parametrize("kind", UNREADABLE)
def test_files_that_are_no_adapter_are_refused(
    engine: Engine, adapted: Adapted, kind: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapted.adapters[FIRST], tmp_path / "adapter")
    name, content = UNREADABLE[kind]
    (folder / name).write_bytes(content)
    found = engine.llm.collective_rpc("load_adapter", args=("broken", 10, str(folder)))
    assert all(found), found


def test_a_trace_with_a_broken_adapter_fails_alone(
    model: AdaptedVLLM, requests: dict[str, LoRARequest | None], adapted: Adapted, tmp_path: Path
) -> None:
    write_broken(adapted.adapters[FIRST], "NaN", tmp_path)
    for one in (LoRARequest("broken", 11, str(tmp_path)), LoRARequest("gone", 12, str(tmp_path / "gone"))):
        with (
            pytest.raises(ApiError, match=f"'{one.lora_name}' cannot be loaded"),
            model.trace(PROMPT_IDS, lora_request=one),
        ):
            _ = save(model.logits.output)
    with model.trace(PROMPT_IDS, lora_request=requests[SECOND]):
        logits = save(model.logits.output)
    assert logits.isfinite().all()


def test_the_files_of_an_adapter_are_read_again_between_steps_only(
    model: AdaptedVLLM, adapted: Adapted, tmp_path: Path
) -> None:
    """More adapters than the engine keeps: their folders are removed after the first use."""
    folders = [write_adapter(adapted.base, tmp_path / f"{one}", seed=one) for one in range(20, 25)]
    requests = [LoRARequest(one.name, int(one.name), str(one)) for one in folders]
    for one in requests:
        with model.trace(PROMPT_IDS, temperature=0.0, lora_request=one):
            last = save(model.logits.output)
    shutil.rmtree(tmp_path)
    with model.trace(PROMPT_IDS, temperature=0.0, lora_request=requests[-1]):
        again = save(model.logits.output)
    torch.testing.assert_close(again, last)
    with (
        pytest.raises(ApiError, match="'20' cannot be loaded"),
        model.trace(PROMPT_IDS, lora_request=requests[0]),
    ):
        _ = save(model.logits.output)


def test_a_target_before_the_lens_is_refused_by_name(adapted: Adapted) -> None:
    with pytest.raises(UnsupportedOptionError, match="lm_head"):
        VLLM(str(adapted.base), dispatch=True, **_ENGINE, lora_target_modules=["lm_head"])


@pytest.mark.heavy
def test_an_adapter_of_a_real_model(bundled: Path, tmp_path: Path) -> None:
    adapter = write_adapter(bundled, tmp_path / "adapter", std=0.05)
    merged = load_reference_model(write_merged(bundled, adapter, tmp_path / "merged"))
    prompt = [504, 2345, 1234, 99, 314]
    points = ["layers.0.attn.q", "layers.15.mlp.act", "layers.29.output", "norm.output"]
    activations = reference_activations(tmp_path / "merged", prompt)
    capture = {"op": "capture", "at": points, "where": {"phase": "prompt"}, "name": "captured"}
    options = {**_ENGINE, "max_num_seqs": 2}
    with Engine(bundled, **options) as engine:
        request = LoRARequest("adapter", 1, str(adapter))
        reply, plain = engine.ask(prompt, [capture], adapter=request), engine.ask(prompt)
    assert reply.token_ids == continued(merged, prompt, len(reply.token_ids)).token_ids != plain.token_ids
    for point in points:
        wanted = activations[point]
        ours = reply.tensor("captured", point)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
