"""The recurrent states of Mamba-2 mixers are those that transformers keeps after the same tokens.

Each family's engine computes prompts in chunks, and some requests twice, after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from api_schemas.errors import ApiError, ErrorCode
from tests.e2e.harness import Ask, Engine, Reply
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint
from tests.families.reference import load_reference_model

pytestmark = pytest.mark.e2e

LAYERS: Final = {
    "falcon_h1": [0, 1, 2, 3],
    "granitemoehybrid": [0, 2],
    "mamba2": [0, 1, 2, 3],
    "nemotron_h": [0, 3],
    "zamba2": [0, 1, 2, 3],
}
"""The layers of each family that have a recurrent mixer."""
SHAPES: Final = dict.fromkeys(LAYERS, (8, 32, 32))
ENDS: Final[dict[str, Any]] = {"range": [-1, None]}
CAPTURE: Final[dict[str, Any]] = {"op": "capture", "at": "layers.*.mixer.state", "where": ENDS, "name": "c"}
NUM_TOKENS: Final = 24


def prompt(seed: int, length: int = 110) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 300, (length,), generator=generator).tolist()


@pytest.fixture(
    scope="module",
    params=[one if one == "nemotron_h" else pytest.param(one, marks=pytest.mark.heavy) for one in LAYERS],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.nn.Module:
    return load_reference_model(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, reference: torch.nn.Module) -> Iterator[Engine]:
    with Engine(
        checkpoint,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=160,
        num_gpu_blocks_override=128,
    ) as engine:
        yield engine


def expected(model: Any, prompt_ids: list[int], generated: list[int]) -> list[dict[int, torch.Tensor]]:
    """Return transformers' states by layer, after the prompt and after each generated token but the last."""
    family = model.config.model_type
    cached = "cache_params" if family == "mamba2" else "past_key_values"
    cache, found = None, []
    with torch.no_grad():
        for ids in (prompt_ids, *([token] for token in generated[:-1])):
            output = model(torch.tensor([ids]), use_cache=True, **({} if cache is None else {cached: cache}))
            cache = getattr(output, cached)
            found.append(
                {layer: cache.layers[layer].recurrent_states[0][0].clone() for layer in LAYERS[family]}
            )
    return found


def assert_states(family: str, reply: Reply, model: Any, ask: Ask) -> None:
    assert reply.failure is None
    assert isinstance(ask.prompt, list)
    result = reply.result("c")
    assert list(result.points) == [f"layers.{layer}.mixer.state" for layer in LAYERS[family]]  # type: ignore[union-attr] # a capture
    last = len(ask.prompt) - 1
    assert result.positions == list(range(last, last + ask.max_tokens))
    states = expected(model, ask.prompt, reply.token_ids)
    for layer in LAYERS[family]:
        point = f"layers.{layer}.mixer.state"
        wanted = torch.stack([one[layer] for one in states])
        value = reply.tensor("c", point)
        assert value.shape == (ask.max_tokens, *SHAPES[family])
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()), msg=point)


def test_states_are_those_of_transformers(family: str, engine: Engine, reference: torch.nn.Module) -> None:
    asks = [Ask(prompt(index, 90 + 7 * index), [CAPTURE], max_tokens=NUM_TOKENS) for index in range(4)]
    replies = [reply for (reply,) in engine.run(asks)]
    for ask, reply in zip(asks, replies, strict=True):
        assert_states(family, reply, reference, ask)


def test_states_come_once_after_a_preemption(family: str, engine: Engine, reference: torch.nn.Module) -> None:
    asks = [Ask(prompt(10 + index, 90), [CAPTURE], max_tokens=NUM_TOKENS) for index in range(3)]
    pending = [engine.submit(ask) for ask in asks]
    for num_steps in (5, 9):
        for _ in range(num_steps):
            engine.core.step()
        engine.core.reset_prefix_cache(reset_running_requests=True)
    for ask, (reply,) in zip(asks, engine.finish(pending), strict=True):
        assert_states(family, reply, reference, ask)
        assert reply.collected is not None
        assert reply.collected.recomputed_tokens >= len(ask.prompt)


def test_a_prompt_longer_than_a_step_is_read_at_its_end(
    family: str, engine: Engine, reference: torch.nn.Module
) -> None:
    ask = Ask(prompt(20, 200), [CAPTURE], max_tokens=3)
    ((reply,),) = engine.run([ask])
    assert_states(family, reply, reference, ask)


def test_writes_of_one_request_stay_out_of_the_states_of_others(
    family: str, engine: Engine, reference: torch.nn.Module
) -> None:
    vector = torch.randn(HIDDEN_SIZE, generator=torch.Generator().manual_seed(3)).tolist()
    steer = {"op": "steer", "at": "embed.output", "vector": vector, "scale": 4.0}
    asks = [Ask(prompt(40 + index, 50), [steer, CAPTURE], max_tokens=4) for index in range(2)]
    asks.insert(1, Ask(prompt(60, 50), [CAPTURE], max_tokens=4))
    replies = [reply for (reply,) in engine.run(asks)]
    assert_states(family, replies[1], reference, asks[1])
    point = f"layers.{LAYERS[family][0]}.mixer.state"
    alone = [engine.ask(ask.prompt, ask.interventions, max_tokens=4) for ask in asks]
    for reply, one in zip(replies, alone, strict=True):
        torch.testing.assert_close(reply.tensor("c", point), one.tensor("c", point), rtol=1e-4, atol=1e-5)


def test_reductions_and_generated_positions(engine: Engine, family: str) -> None:
    ids, point = prompt(70, 30), f"layers.{LAYERS[family][0]}.mixer.state"
    captures: list[dict[str, Any]] = [
        {**CAPTURE, "at": point},
        {**CAPTURE, "at": point, "reduce": "last", "name": "last"},
        {**CAPTURE, "at": point, "reduce": "mean", "name": "mean"},
        {**CAPTURE, "at": point, "where": {"positions": [-1, 31]}, "name": "two"},
        {**CAPTURE, "at": point, "where": {"phase": "generated"}, "dtype": "bfloat16", "name": "half"},
    ]
    reply = engine.ask(ids, captures, max_tokens=6)
    states = reply.tensor("c", point)
    assert torch.equal(reply.tensor("last", point), states[-1])
    torch.testing.assert_close(reply.tensor("mean", point), states.mean(dim=0))
    assert reply.result("two").positions == [29, 31]
    assert torch.equal(reply.tensor("two", point), states[[0, 2]])
    assert torch.equal(reply.tensor("half", point), states[1:].bfloat16().float())


@pytest.mark.parametrize("where", [{}, {"phase": "prompt"}, {"positions": [3]}, {"range": [-2, None]}])
def test_states_inside_a_prompt_are_refused(engine: Engine, family: str, where: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        engine.ask(prompt(80, 20), [{**CAPTURE, "where": where}])
    assert caught.value.code is ErrorCode.UNSUPPORTED_AT_POINT
    assert caught.value.param == "interventions.0.where"
