"""Kernels that read give the right values and leave the model's memory as it was, bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from nnsight_engine.plans.step.reads import GatherKernel, ProbeKernel

ROWS, WIDTH = 6, 5
SERVED = (torch.float32, torch.bfloat16)
CAPTURED = (torch.float32, torch.bfloat16, torch.float16)
CASES = list(itertools.product(SERVED, CAPTURED, (True, False), (True, False), (True, False)))


def of_model(dtype: torch.dtype, *, contiguous: bool, seed: int) -> torch.Tensor:
    """Return a tensor of the model, or a part of a larger one."""
    values = torch.randn(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values[:, :WIDTH].contiguous() if contiguous else values[:, ::2]


@pytest.mark.parametrize(("served", "captured", "contiguous", "adjoining", "paired"), CASES)
def test_a_capture_changes_nothing(
    served: torch.dtype,
    captured: torch.dtype,
    contiguous: bool,
    adjoining: bool,
    paired: bool,
) -> None:
    hidden = of_model(served, contiguous=contiguous, seed=1)
    residual = of_model(served, contiguous=contiguous, seed=2) if paired else None
    before = hidden.clone(), None if residual is None else residual.clone()
    rows = [1, 2, 3] if adjoining else [0, 2, 5]
    # One site among several of a group's buffer.
    out = torch.zeros(len(rows), 2, WIDTH, dtype=captured)
    GatherKernel(torch.tensor(rows), (1, 4) if adjoining else None, out[:, 1]).run(hidden, residual)
    assert torch.equal(hidden, before[0])
    assert residual is None or (before[1] is not None and torch.equal(residual, before[1]))
    own = before[0][rows]
    if before[1] is not None:
        wide = served if captured == served else torch.float32
        own = own.to(wide) + before[1][rows].to(wide)
    assert torch.equal(out[:, 1], own.to(captured))
    assert not out[:, 0].any()


@pytest.mark.parametrize(("served", "contiguous"), list(itertools.product(SERVED, (True, False))))
def test_a_probe_changes_nothing(served: torch.dtype, contiguous: bool) -> None:
    hidden = of_model(served, contiguous=contiguous, seed=1)
    residual = of_model(served, contiguous=contiguous, seed=2)
    before = hidden.clone(), residual.clone()
    weights, bias, out = torch.ones(2, WIDTH), torch.tensor([1.0, 2.0]), torch.empty(2)
    ProbeKernel(torch.tensor([0, 4]), weights, bias, out).run(hidden, residual)
    assert torch.equal(hidden, before[0])
    assert torch.equal(residual, before[1])
    expected = (before[0][[0, 4]].float() + before[1][[0, 4]].float()).sum(dim=-1) + bias
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("served", "captured"), list(itertools.product(SERVED, CAPTURED)))
def test_a_capture_reports_rows_beyond_its_dtype(served: torch.dtype, captured: torch.dtype) -> None:
    hidden = torch.zeros(ROWS, WIDTH, dtype=served)
    residual = torch.zeros(ROWS, WIDTH, dtype=served)
    largest = torch.finfo(served).max
    hidden[1, 2] = residual[4, 0] = largest  # beyond narrower dtypes
    hidden[2, 2] = float("inf")  # the model's own
    hidden[3, 3] = float("nan")
    out, overflows = torch.empty(ROWS, WIDTH, dtype=captured), torch.empty(ROWS, dtype=torch.bool)
    GatherKernel(torch.arange(ROWS), (0, ROWS), out, overflows).run(hidden, residual)
    is_narrower = torch.finfo(captured).max < largest
    assert overflows.tolist() == [is_narrower and row in {1, 4} for row in range(ROWS)]
    assert out[2].isinf().sum() == 1
    assert out[3].isnan().sum() == 1
