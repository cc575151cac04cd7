"""What tests and fixtures draw without a seed of their own is the same in every run and order."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.conftest import seed


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.fixture(scope="module")
def of_module() -> tuple[float, float, float]:
    return drawn()


def test_a_test_draws_the_same_whatever_ran_before(request: pytest.FixtureRequest) -> None:
    here = drawn()
    assert drawn() != here
    seed(request.node.nodeid)
    assert drawn() == here


@pytest.mark.parametrize("before", [0, 1])
def test_a_fixture_draws_the_same_whichever_test_is_first(
    before: int, request: pytest.FixtureRequest
) -> None:
    for _ in range(before):
        drawn()
    found = request.getfixturevalue("of_module")
    seed("tests/unit/test_seeds.py::of_module")
    assert found == drawn()


def test_ctrl_c_is_not_ignored_where_a_shell_starts_the_tests_in_its_background() -> None:
    script = "import signal, tests.conftest; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    command = ["bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
