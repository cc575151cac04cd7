"""Writes along directions, batched over random requests, equal the same formulas computed row by row."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight_engine.core.dtypes import floats_from_bytes
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.kernel_factory import KernelFactory, KernelMember, group_key
from nnsight_engine.plans.step.ledger import ByteLedger
from nnsight_engine.plans.step.patterns import AttentionForm
from nnsight_engine.plans.step.registrar import Registrar
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled, tensors_of

WIDTH, NUM_LAYERS, PROMPT = 12, 3, [7, 8, 9]
CPU = torch.device("cpu")

Doubles = npt.NDArray[np.float64]


def context(width: int = WIDTH) -> StepContext:
    spec = tiny_spec(num_layers=NUM_LAYERS, hidden_size=width)
    ledger = ByteLedger(max_request_bytes=1 << 20, max_engine_bytes=1 << 20)
    return StepContext(spec, torch.float32, CPU, ledger, lambda _: AttentionForm(1.0))


def registered(registrar: Registrar, at: StepContext, number: int, op: dict[str, Any]) -> ActiveRequest:
    request = compiled(op, spec=at.spec, prompt=PROMPT)
    return registrar.register(str(number), request.plan, tensors_of(request))


class Author:
    """Writes random operations at all layers; of every third seed, only subspaces of one dimension."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self._subspaces_only = seed % 3 == 0
        self._numbers = np.random.default_rng(seed)

    def vector(self) -> Any:
        shape = self.pick.choice([(WIDTH,), (NUM_LAYERS, WIDTH)])
        return (self._numbers.normal(size=shape) * self.pick.choice([0.01, 1, 30])).astype("<f4").tolist()

    def vectors(self, *, weighted: bool) -> list[dict[str, Any]]:
        number = 2 if self._subspaces_only else self.pick.randint(1, 5)
        found = [{"vector": self.vector()} for _ in range(number)]
        if weighted:
            for one in found:
                one["weight"] = self.pick.choice([1, -1, 0.25, -3.5])
        elif not self._subspaces_only and self.pick.random() < 0.5:  # a dependent one
            found.append({"vector": (np.asarray(found[0]["vector"]) * -2.5).tolist()})
        return found

    def operation(self) -> dict[str, Any]:
        pick = self.pick
        mode = pick.choice(["add", "norm_match", "project_out", "project_out", "clamp", "clamp", "affine"])
        mode = "project_out" if self._subspaces_only else mode
        op: dict[str, Any] = {"op": "steer", "at": "layers.*.output", "mode": mode}
        if self._subspaces_only or pick.random() < 0.6:
            op["vectors"] = self.vectors(weighted=mode != "project_out")
        else:
            op["vector"] = self.vector()
        if mode == "affine":
            names = pick.choice([["gain"], ["offset"], ["gain", "offset"]])
        elif mode == "clamp":
            names = pick.choice([["scale"], ["low"], ["high"], ["low", "high"]])
        else:
            names = pick.choice([[], ["scale"]])
        numbers = sorted(round(pick.uniform(-2, 2), 3) for _ in names)
        return op | dict(zip(names, numbers, strict=True))


def at_layer(tensor: Any, layer: int) -> Doubles:
    rows = np.asarray(tensor, np.float64)
    return rows if rows.ndim == 1 else rows[layer : layer + 1].reshape(-1)


def expected(op: dict[str, Any], layer: int, x: Doubles) -> Doubles:
    """Return one row after an operation, from the formulas in docs/interventions.md, in float64."""
    vectors = np.stack([at_layer(one["vector"], layer) for one in op.get("vectors", [op])])
    scale = op.get("scale", 1.0)
    result: Doubles
    if "vectors" in op and op["mode"] == "project_out":
        result = x - scale * (np.linalg.pinv(vectors, rcond=1e-5) @ vectors) @ x
        return result
    weights = [one.get("weight", 1.0) for one in op["vectors"]] if "vectors" in op else [1.0]
    v = weights @ vectors
    unit = v / np.linalg.norm(v)
    c = float(x @ unit)
    match op["mode"]:
        case "add":
            result = x + scale * v
        case "norm_match":
            result = x + scale * np.linalg.norm(x) * unit
        case "project_out":
            result = x - scale * c * unit
        case "affine":
            result = x + (op.get("gain", 1.0) * c + op.get("offset", 0.0) - c) * unit
        case _:
            is_interval = "low" in op or "high" in op
            wanted = min(max(c, op.get("low", c)), op.get("high", math.inf)) if is_interval else scale
            result = x + (wanted - c) * unit
    return result


@dataclasses.dataclass
class Member:
    """A request's operation and its rows in a step."""

    op: dict[str, Any]
    member: KernelMember
    mask: list[bool] | None


def members(author: Author, layer: int, num_requests: int) -> list[Member]:
    """Return requests with an operation each, some with another's, on rows that no two share."""
    at = context()
    registrar = Registrar(at)
    pick, row, found = author.pick, 0, []
    operations = [author.operation() for _ in range(num_requests)]
    for number in range(num_requests):
        op = pick.choice(operations)
        request = registered(registrar, at, number, op)
        num_rows = pick.choice([1, 1, 1, 4])
        rows = np.arange(row, row + num_rows + 1)
        rows = np.delete(rows, pick.randrange(len(rows)))
        row += num_rows + 1
        mask = [pick.random() < 0.5 for _ in rows] if pick.random() < 0.3 else None
        one = KernelMember(request, request.ops[0], layer, rows)
        one.mask = None if mask is None else torch.tensor(mask)
        found.append(Member(op, one, mask))
    pick.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_batched_writes_equal_the_formulas_row_by_row(seed: int) -> None:
    author = Author(seed)
    layer = author.pick.randrange(NUM_LAYERS)
    step = members(author, layer, author.pick.randint(1, 12))
    num_rows = 2 + max(int(one.member.rows[-1]) for one in step)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, WIDTH, generator=generator)
    residual = torch.randn(num_rows, WIDTH, generator=generator) if seed % 2 else None
    before = hidden + residual if residual is not None else hidden.clone()
    wanted = before.double().numpy().copy()
    changed = set()
    for one in step:
        for place, row in enumerate(one.member.rows.tolist()):
            if one.mask is None or one.mask[place]:
                wanted[row] = expected(one.op, layer, wanted[row])
                changed.add(row)
    groups: dict[Any, list[KernelMember]] = {}
    for one in step:
        groups.setdefault(group_key(one.member), []).append(one.member)
    factory = KernelFactory(CPU)
    for group in groups.values():
        factory.build(group).run(hidden, residual)
    after = hidden + residual if residual is not None else hidden
    np.testing.assert_allclose(after.numpy(), wanted, rtol=1e-4, atol=1e-3)
    others = [row for row in range(num_rows) if row not in changed]
    assert torch.equal(after[others], before[others])


def test_a_value_inside_its_interval_keeps_its_bits_and_others_do_not_notice_bounds() -> None:
    at = context()
    registrar = Registrar(at)
    steer = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * WIDTH, "mode": "clamp"}
    inside = registered(registrar, at, 0, steer | {"low": -1e4, "high": 1e4})
    fixed = registered(registrar, at, 1, steer | {"scale": 2.0})
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
    at = context(width)
    registrar = Registrar(at)
    vectors = [{"vector": row.tolist()} for row in np.random.default_rng(0).normal(size=(k, width))]
    op = {"op": "steer", "at": "layers.1.output", "vectors": vectors, "mode": "project_out"}
    step, start = [], 0
    for number in range(num_sharing):
        request = registered(registrar, at, number, op)
        rows = np.arange(start, start + num_rows // num_sharing)
        step.append(KernelMember(request, request.ops[0], 0, rows))
        start = int(rows[-1]) + 1
    assert len(registrar.bank) == 1
    with Largest() as largest:
        KernelFactory(CPU).build(step).run(torch.randn(num_rows, width), torch.randn(num_rows, width))
    assert largest.numel <= num_rows * width


def test_a_basis_is_orthonormal_and_has_as_many_directions_as_the_vectors_span() -> None:
    rows = np.random.default_rng(1).normal(size=(3, WIDTH)).astype("<f4")
    tiny = rows[2] * np.float32(1e-12)
    vectors = [rows[0], rows[1], rows[0] * 5, tiny, rows[0] + rows[1] * np.float32(1e-9)]
    op = {"op": "steer", "at": "layers.1.output", "mode": "project_out"}
    request = compiled(
        op | {"vectors": [{"vector": one.tolist()} for one in vectors]}, spec=context().spec, prompt=PROMPT
    )
    (tensor,) = request.tensors.values()
    assert tensor.shape == (3, WIDTH)
    basis = floats_from_bytes(tensor.dtype, tensor.data).reshape(tensor.shape)
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-5)
