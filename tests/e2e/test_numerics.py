"""Values that are read and written equal transformers' own, on the bundled model in float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.plans.collect.results import CollectedCapture, CollectedProbe
from tests.e2e import harness
from tests.e2e.harness import Ask, Engine
from tests.e2e.reference import Reference

pytestmark = pytest.mark.e2e

PROMPT = "The Eiffel Tower is in the city of"
LAYER = 12


random_vector = functools.partial(harness.random_vector, width=576)


@pytest.fixture(scope="module")
def engine(bundled: Path) -> Iterator[Engine]:
    with Engine(bundled, dtype="float32", block_size=32, max_num_batched_tokens=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(bundled: Path) -> Reference:
    return Reference(bundled)


def test_captures_equal_transformers_at_all_layers(engine: Engine, reference: Reference) -> None:
    ids = engine.token_ids(PROMPT)
    expected = reference.run(ids)
    points = ["embed.output", "layers.*.output", "layers.*.attn.output", "layers.*.mlp.output", "norm.output"]
    reply = engine.ask(PROMPT, [{"op": "capture", "at": [*points, "logits"], "name": "all"}], max_tokens=1)
    result = reply.result("all")
    assert isinstance(result, CollectedCapture)
    assert set(result.points) == set(expected)
    for point, values in expected.items():
        captured = reply.tensor("all", point)
        # Residuals reach thousands in a few outlier units, so small ones carry their rounding.
        scale = values.abs().amax(dim=-1, keepdim=True)
        torch.testing.assert_close(captured / scale, values / scale, rtol=1e-3, atol=1e-5, msg=point)


def test_captures_of_generated_positions_equal_transformers(engine: Engine, reference: Reference) -> None:
    point = f"layers.{LAYER}.output"
    reply = engine.ask(PROMPT, [{"op": "capture", "at": point, "name": "c"}], max_tokens=6)
    ids = engine.token_ids(PROMPT) + reply.token_ids[:-1]
    result = reply.result("c")
    assert result.positions == list(range(len(ids)))
    expected = reference.run(ids)[point]
    scale = expected.abs().amax(dim=-1, keepdim=True)
    torch.testing.assert_close(reply.tensor("c", point) / scale, expected / scale, rtol=1e-3, atol=1e-5)


def test_other_forms_of_reads_are_of_the_rows(engine: Engine) -> None:
    points = [f"layers.{LAYER}.output", f"layers.{LAYER}.mlp.act", f"layers.{LAYER}.attn.output"]
    point, weights = points[0], random_vector(1)
    fields: list[dict[str, Any]] = [
        {"name": "rows", "at": points},
        {"name": "mean", "at": points, "reduce": "mean"},
        {"name": "last", "at": point, "reduce": "last"},
        {"name": "half", "at": point, "dtype": "bfloat16"},
    ]
    for where in ({}, {"where": {"range": [1, 6]}}):
        reads = [{"op": "capture", **one, **where} for one in fields]
        probe = {"op": "probe", "at": point, "weights": weights, "bias": 0.5, "name": "p", **where}
        reply = engine.ask(PROMPT, [*reads, probe], max_tokens=5)
        rows = reply.tensor("rows", point)
        assert len(rows) == (5 if where else len(engine.token_ids(PROMPT)) + 4)
        for one in points:
            mean = reply.tensor("rows", one).mean(dim=0)
            torch.testing.assert_close(reply.tensor("mean", one), mean, rtol=1e-4, atol=1e-3)
        assert torch.equal(reply.tensor("last", point), rows[-1])
        assert torch.equal(reply.tensor("half", point), rows.bfloat16().float())
        probed = reply.result("p")
        assert isinstance(probed, CollectedProbe)
        assert probed.positions == reply.result("mean").positions
        expected = rows @ torch.tensor(weights) + 0.5
        torch.testing.assert_close(torch.tensor(probed.points[point]), expected, rtol=1e-4, atol=1e-2)


def test_patching_a_clean_runs_activations_reproduces_its_next_token(engine: Engine) -> None:
    clean, corrupted = "The capital of France is the city of", "The capital of Italy is the city of"
    assert len(engine.token_ids(clean)) == len(engine.token_ids(corrupted))
    point = "layers.8.output"
    source = engine.ask(clean, [{"op": "capture", "at": point, "name": "c"}], max_tokens=1)
    values = source.tensor("c", point)
    positions = list(range(len(values)))
    plain = engine.ask(corrupted, max_tokens=1)
    patched = engine.ask(
        corrupted,
        [{"op": "patch", "at": point, "values": values.tolist(), "where": {"positions": positions}}],
        max_tokens=1,
    )
    assert plain.token_ids != source.token_ids
    assert patched.token_ids == source.token_ids


def test_patch_rows_follow_the_order_of_the_positions(engine: Engine) -> None:
    point = "layers.3.output"
    values = [random_vector(2), random_vector(3)]
    reply = engine.ask(
        PROMPT,
        [
            {"op": "patch", "at": point, "values": values, "where": {"positions": [5, 2]}},
            {"op": "capture", "at": point, "name": "c", "where": {"positions": [2, 5]}},
        ],
        max_tokens=1,
    )
    torch.testing.assert_close(reply.tensor("c", point), torch.tensor([values[1], values[0]]))


UNIT = torch.nn.functional.normalize(torch.tensor(random_vector(4)), dim=0)


def _projection(x: torch.Tensor) -> torch.Tensor:
    return (x @ UNIT).unsqueeze(-1)


SPAN = torch.tensor([random_vector(seed) for seed in (4, 10, 11)])
DIFFERENCE = torch.nn.functional.normalize(SPAN[0] - 0.5 * SPAN[1], dim=0)


def _outside_of_span(x: torch.Tensor) -> torch.Tensor:
    span = SPAN.double()
    outside: torch.Tensor = x.double() - x.double() @ torch.linalg.pinv(span) @ span
    return outside.to(x.dtype)


def _several(*weights: float) -> list[dict[str, Any]]:
    return [{"vector": row.tolist(), "weight": one} for row, one in zip(SPAN, weights, strict=False)]


WRITES: list[tuple[dict[str, Any], Any]] = [
    (
        {"op": "steer", "vector": random_vector(4), "scale": 2.0},
        lambda x: x + 2 * torch.tensor(random_vector(4)),
    ),
    (
        {"op": "steer", "vector": random_vector(4), "scale": 0.3, "mode": "norm_match"},
        lambda x: x + 0.3 * x.norm(dim=-1, keepdim=True) * UNIT,
    ),
    (
        {"op": "steer", "vector": random_vector(4), "mode": "project_out"},
        lambda x: x - _projection(x) * UNIT,
    ),
    (
        {"op": "steer", "vector": random_vector(4), "scale": 7.0, "mode": "clamp"},
        lambda x: x + (7.0 - _projection(x)) * UNIT,
    ),
    (
        {"op": "steer", "vector": random_vector(4), "low": -1.0, "high": 0.5, "mode": "clamp"},
        lambda x: x + (_projection(x).clamp(-1.0, 0.5) - _projection(x)) * UNIT,
    ),
    (
        {"op": "steer", "vector": random_vector(4), "gain": -2.0, "offset": 3.0, "mode": "affine"},
        lambda x: x + (3.0 - 3.0 * _projection(x)) * UNIT,
    ),
    (
        {"op": "steer", "vectors": _several(1.0, -0.5), "scale": 0.3, "mode": "norm_match"},
        lambda x: x + 0.3 * x.norm(dim=-1, keepdim=True) * DIFFERENCE,
    ),
    ({"op": "steer", "vectors": _several(1.0, 1.0, 1.0), "mode": "project_out"}, _outside_of_span),
    (
        {"op": "steer", "vector": random_vector(4), "scale": 3.0, "mode": "replace"},
        (3.0 * torch.tensor(random_vector(4))).expand_as,
    ),
    ({"op": "ablate"}, torch.zeros_like),
    ({"op": "ablate", "method": "mean"}, lambda x: x.mean(dim=0, keepdim=True).expand_as(x)),
    (
        {"op": "ablate", "method": "vector", "vector": random_vector(5)},
        lambda x: torch.tensor(random_vector(5)).expand_as(x),
    ),
    (
        {"op": "ablate", "units": [3, 100, 575]},
        lambda x: x.index_fill(1, torch.tensor([3, 100, 575]), 0.0),
    ),
]


def _name(operation: dict[str, Any]) -> str:
    how = operation.get("mode") or operation.get("method") or ("units" if "units" in operation else "plain")
    more = [field for field in ("vectors", "low") if field in operation]
    return " ".join([operation["op"], how, *more])


@pytest.mark.parametrize(("operation", "edit"), WRITES, ids=[_name(write) for write, _ in WRITES])
def test_writes_equal_the_same_edit_in_transformers(
    engine: Engine, reference: Reference, operation: dict[str, Any], edit: Any
) -> None:
    point = f"layers.{LAYER}.output"
    capture = {"op": "capture", "at": "logits", "name": "logits"}
    reply = engine.ask(PROMPT, [{**operation, "at": point}, capture], max_tokens=1)
    expected = reference.run_edited(engine.token_ids(PROMPT), LAYER, edit)
    torch.testing.assert_close(reply.tensor("logits", "logits"), expected, rtol=1e-3, atol=2e-3)


DIRECTED = [write for write in WRITES if {"vectors", "low", "gain"} & write[0].keys()]


@pytest.mark.parametrize(("operation", "edit"), DIRECTED, ids=[_name(write) for write, _ in DIRECTED])
def test_generated_positions_are_written_in_a_batch_of_many_ways(
    engine: Engine, reference: Reference, operation: dict[str, Any], edit: Any
) -> None:
    point = f"layers.{LAYER}.output"
    capture = {"op": "capture", "at": "logits", "name": "logits"}
    asks = [
        Ask(PROMPT, [{**one, "at": point, "where": {"range": [1, None]}}, capture], max_tokens=5)
        for one in (operation, *(other for other, _ in DIRECTED), operation)
    ]
    replies = [reply for (reply,) in engine.run(asks)]
    for reply in (replies[0], replies[-1]):
        ids = engine.token_ids(PROMPT) + reply.token_ids[:-1]

        def edited(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:1], edit(x[1:])])

        expected = reference.run_edited(ids, LAYER, edited)
        torch.testing.assert_close(reply.tensor("logits", "logits"), expected, rtol=1e-3, atol=2e-3)
        assert reply.collected is not None
        assert reply.collected.applied[0].positions == list(range(1, len(ids)))


def test_writes_at_some_positions_leave_the_others_alone(engine: Engine, reference: Reference) -> None:
    def edit(x: torch.Tensor) -> torch.Tensor:
        x[[0, 4]] += torch.tensor(random_vector(6))
        return x

    reply = engine.ask(
        PROMPT,
        [
            {
                "op": "steer",
                "at": f"layers.{LAYER}.output",
                "vector": random_vector(6),
                "where": {"positions": [0, 4]},
            },
            {"op": "capture", "at": "logits", "name": "logits"},
        ],
        max_tokens=1,
    )
    expected = reference.run_edited(engine.token_ids(PROMPT), LAYER, edit)
    torch.testing.assert_close(reply.tensor("logits", "logits"), expected, rtol=1e-3, atol=2e-3)
    assert reply.collected is not None
    assert reply.collected.applied[0].positions == [0, 4]


def test_later_operations_see_earlier_ones_at_the_same_place(engine: Engine) -> None:
    point = "layers.5.output"
    reply = engine.ask(
        PROMPT,
        [
            {"op": "capture", "at": point, "name": "before"},
            {"op": "steer", "at": point, "vector": random_vector(7)},
            {"op": "capture", "at": point, "name": "between"},
            {"op": "ablate", "at": "layers.6.input", "where": {"positions": [1]}},
            {"op": "capture", "at": "layers.6.input", "name": "after"},
        ],
        max_tokens=1,
    )
    before, between = reply.tensor("before", point), reply.tensor("between", point)
    after = reply.tensor("after", "layers.6.input")
    torch.testing.assert_close(
        between - before, torch.tensor(random_vector(7)).expand_as(before), atol=1e-2, rtol=0
    )
    assert torch.equal(after[1], torch.zeros(576))
    assert torch.equal(after[2:], between[2:])


def test_logits_can_be_steered_and_samples_read(engine: Engine) -> None:
    wanted = engine.tokenizer.encode(" Rome", add_special_tokens=False)[0]
    bias = [0.0] * engine.spec.vocab_size
    bias[wanted] = 100.0
    reply = engine.ask(
        PROMPT,
        [
            {"op": "steer", "at": "logits", "vector": bias, "where": {"positions": [-1]}},
            {"op": "capture", "at": "samples", "name": "s"},
        ],
        max_tokens=3,
    )
    assert reply.token_ids[0] == wanted
    assert reply.tensor("s", "samples").tolist() == reply.token_ids


def test_a_mean_of_logits_is_over_the_requests_own_prompt(engine: Engine, reference: Reference) -> None:
    mean = {"op": "ablate", "at": "logits", "method": "mean"}
    # Somebody whose logits are all computed stands before it in the step.
    other = Ask("I think dogs are", [{"op": "capture", "at": "logits"}], max_tokens=1)
    own = Ask(PROMPT, [mean], max_tokens=2, sampling={"logprobs": 5})
    for asks in ([own], [other, own]):
        ((reply,),) = engine.run(asks)[-1:]
        assert reply.failure is None
        logprobs = reference.run(engine.token_ids(PROMPT))["logits"].mean(dim=0).log_softmax(dim=-1)
        for step in reply.logprobs:  # generated positions get the prompt's mean, too
            given = torch.tensor(list(step.values()))
            torch.testing.assert_close(given, logprobs[list(step)], rtol=1e-3, atol=2e-3)


def test_stacks_of_vectors_give_each_point_its_own(engine: Engine) -> None:
    stack = [random_vector(8), random_vector(9)]
    points = ["layers.2.output", "layers.7.output"]
    capture = [{"op": "capture", "at": points, "name": "c"}]
    plain = engine.ask(PROMPT, capture, max_tokens=1)
    steered = engine.ask(PROMPT, [{"op": "steer", "at": points, "vector": stack}, *capture], max_tokens=1)
    first = steered.tensor("c", points[0]) - plain.tensor("c", points[0])
    torch.testing.assert_close(first, torch.tensor(stack[0]).expand_as(first), atol=1e-2, rtol=0)
    replaced = engine.ask(
        PROMPT, [{"op": "steer", "at": points, "vector": stack, "mode": "replace"}, *capture], max_tokens=1
    )
    assert torch.equal(replaced.tensor("c", points[1])[0], torch.tensor(stack[1]))
