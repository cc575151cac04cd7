"""A read that met no position has a result all the same, of whatever kind and however reduced."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedLens,
    CollectedProbe,
    CollectedTrace,
)
from nnsight_engine.plans.records import Payload, StepInfo
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled

SPEC = tiny_spec(num_layers=6, hidden_size=4)
PROMPT = [7, 8, 9]
POINTS = (
    ["layers.*.output"],
    ["layers.*.output", "logits", "layers.0.attn.q"],
    ["layers.0.attn.pattern"],
    ["samples"],
)
CAPTURES: list[dict[str, Any]] = [
    {"op": "capture", "at": at, "reduce": reduce} | ({} if dtype is None else {"dtype": dtype})
    for at, reduce, dtype in itertools.product(POINTS, ("none", "last", "mean"), (None, "float16"))
    if not (reduce == "mean" and at[0].endswith("pattern"))
    and not (at == ["samples"] and (reduce == "mean" or dtype))
]
OTHERS: list[dict[str, Any]] = [
    {"op": "probe", "at": ["layers.0.output", "layers.2.output"], "weights": [1.0] * 4},
    {"op": "logit_lens", "layers": "*", "top_k": 2, "targets": [5]},
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("op", [*CAPTURES, *OTHERS])
def test_a_read_that_met_nothing_has_an_entry(op: dict[str, Any], stream: bool) -> None:
    request = compiled(op | {"where": {"phase": "generated"}}, spec=SPEC, prompt=PROMPT, stream=stream)
    collector = RequestCollector(request.plan, SPEC, prompt_token_ids=PROMPT, op_names=[op["op"]])
    # The first token ends the answer, so that no generated position is ever computed.
    collector.add(Payload([], StepInfo(0, len(PROMPT), 0, "tap")))
    collected = collector.take_final([1])
    (result,) = collected.results
    assert not isinstance(result, CollectedTrace)
    assert not isinstance(result, CollectedLens) or all(rows == [] for rows in result.layers.values())
    assert result.positions == []
    (applied,) = collected.applied
    assert applied.positions == []
    if isinstance(result, CollectedCapture):
        assert list(result.points) == applied.at
        for tensor in result.points.values():
            assert tensor.shape[0] == 0
            assert tensor.data == b""
    elif isinstance(result, CollectedProbe):
        assert all(values == [] for values in result.points.values())
