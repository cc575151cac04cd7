"""The GPU's benchmark where there is none: plans do what they are timed for, and waiting would be noticed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.waiting import WaitError, no_waiting

CPU = torch.device("cpu")


@pytest.fixture
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_own_threads")
def test_traces_and_plans_run_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--device", "cpu", "--repeats", "1", "--quick", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    monkeypatch.setenv("COLUMNS", "200")
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    assert "twelve" in printed
    assert "steered" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 1
    assert "finds no CUDA GPU" in capsys.readouterr().out


def test_handing_a_number_to_python_is_waiting_and_arithmetic_is_not() -> None:
    values = torch.ones(3)
    with no_waiting(CPU):
        total = values.sum()
    with pytest.raises(WaitError, match="_local_scalar_dense"), no_waiting(CPU):
        total.item()
    assert total.item() == 3
