"""Writes along directions: what they leave alone, and what they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight_engine.core.dtypes import floats_from_bytes
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.kernel_factory import KernelFactory, KernelMember
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled
from tests.unit.plans.toy_engine import StepEngine

WIDTH, PROMPT = 12, [7, 8, 9]
CPU = torch.device("cpu")


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
    step = [
        KernelMember(one, one.ops[0], 0, np.array([row], np.int64)) for row, one in enumerate((inside, fixed))
    ]
    together, alone = values.clone(), values.clone()
    factory = KernelFactory(CPU)
    factory.build(step).run(together, None)
    factory.build(step[1:]).run(alone, None)
    assert torch.equal(together[0], values[0])
    assert torch.equal(together[1], alone[1])


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("num_sharing", [1, 40])
def test_a_subspace_takes_no_more_memory_than_the_rows_and_the_bases(num_sharing: int) -> None:
    width, k, num_rows = 64, 32, 200
    at = engine(width)
    vectors = [{"vector": row.tolist()} for row in np.random.default_rng(0).normal(size=(k, width))]
    op = {"op": "steer", "at": "layers.1.output", "vectors": vectors, "mode": "project_out"}
    step, start = [], 0
    for number in range(num_sharing):
        request = admitted(at, number, op)
        rows = np.arange(start, start + num_rows // num_sharing)
        step.append(KernelMember(request, request.ops[0], 0, rows))
        start = int(rows[-1]) + 1
    assert len(at.registrar.bank) == 1
    with Largest() as largest:
        KernelFactory(CPU).build(step).run(torch.randn(num_rows, width), torch.randn(num_rows, width))
    assert largest.numel <= num_rows * width


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
