"""Writes along directions: what they leave alone, and what they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nnsight_engine.core.dtypes import floats_from_bytes
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.plan import Span
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled
from tests.unit.plans.toy_engine import StepEngine

WIDTH, PROMPT = 12, [7, 8, 9]


def engine(width: int = WIDTH) -> StepEngine:
    return StepEngine(tiny_spec(num_layers=3, hidden_size=width))


def admitted(at: StepEngine, number: int, op: dict[str, Any]) -> ActiveRequest:
    return at.admit(str(number), compiled(op, spec=at.spec, prompt=PROMPT))


def test_a_value_inside_its_interval_keeps_its_bits_and_others_do_not_notice_bounds() -> None:
    at = engine()
    steer = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * WIDTH, "mode": "clamp"}
    inside = admitted(at, 0, steer | {"low": -1e4, "high": 1e4})
    fixed = admitted(at, 1, steer | {"scale": 2.0})
    values = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    ids, together, alone = np.asarray(PROMPT, np.int32), values.clone(), values.clone()
    spans = [Span(one, row, 1, row, ids) for row, one in enumerate((inside, fixed))]
    for some, own in ((spans, together), (spans[1:], alone)):
        at.builder.plan(some).run(2, own, None)
    assert torch.equal(together[0], values[0])
    assert torch.equal(together[1], alone[1])


def test_a_basis_is_orthonormal_and_has_as_many_directions_as_the_vectors_span() -> None:
    rows = np.random.default_rng(1).normal(size=(3, WIDTH)).astype("<f4")
    tiny = rows[2] * np.float32(1e-12)
    vectors = [rows[0], rows[1], rows[0] * 5, tiny, rows[0] + rows[1] * np.float32(1e-9)]
    op = {"op": "steer", "at": "layers.1.output", "mode": "project_out"}
    request = compiled(
        op | {"vectors": [{"vector": one.tolist()} for one in vectors]}, spec=engine().spec, prompt=PROMPT
    )
    (tensor,) = request.tensors.values()
    assert tensor.shape == (3, WIDTH)
    basis = floats_from_bytes(tensor.dtype, tensor.data).reshape(tensor.shape)
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-5)
