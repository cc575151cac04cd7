"""The GPU's benchmark where there is none: plans do what they are timed for, and waiting would be noticed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import pytest
import torch

from benchmarks.plan_steps import PlanCheckError, no_waiting
from benchmarks.report import Row, rows_of
from benchmarks.runner import run
from benchmarks.tables import gpu

CPU = torch.device("cpu")


@pytest.fixture
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows(device: str) -> list[Row]:
    with contextlib.ExitStack() as stack:
        *_, results = run(gpu.plan(argparse.Namespace(device=device, quick=True), stack), 1)
    return rows_of([results])


@pytest.mark.heavy
@pytest.mark.usefixtures("_own_threads")
def test_traces_and_plans_run_without_a_gpu() -> None:
    measured = rows("cpu")
    assert all(row.value is not None for row in measured)
    assert {"twelve saved values", "one request steered"} <= {row.case for row in measured}


@pytest.mark.usefixtures("_own_threads")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert all("finds no CUDA GPU" in row.note for row in rows("cuda"))


def test_handing_a_number_to_python_is_waiting_and_arithmetic_is_not() -> None:
    values = torch.ones(3)
    with no_waiting(CPU):
        total = values.sum()
    with pytest.raises(PlanCheckError, match="item waits"), no_waiting(CPU):
        total.item()
    assert total.item() == 3
