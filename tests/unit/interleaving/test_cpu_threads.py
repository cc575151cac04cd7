"""Blocks compute on one CPU thread; the number that other threads use stays as it is."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_engine.interleaving.threads import Threads


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    outside = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(outside)


def on_a_thread(job: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(job()))
    thread.start()
    thread.join()
    return results[0]


def test_a_block_has_one_thread_and_others_have_as_many_as_before() -> None:
    assert Threads(30.0).run(torch.get_num_threads) == 1
    assert torch.get_num_threads() == 4
    assert on_a_thread(torch.get_num_threads) == 4


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("torch.ones(600, 600) @ torch.ones(600, 600)", id="matrix product"),
        pytest.param("torch.randn(10**6).sin()", id="MKL's own number"),
        pytest.param("torch.randn(10**6) + 1", id="parallel_for"),
    ],
)
def test_no_kernel_starts_threads(kernel: str) -> None:
    """Threads that kernels start are counted in a process that has no other reason to start any."""
    process = subprocess.run(
        [sys.executable, "-c", _COUNT.format(kernel=kernel)], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["1", "0"]


_COUNT = """
import os, threading, torch
from nnsight_engine.interleaving.cpu_threads import compute_on_one_thread

def count(limit):
    limit()
    before = len(os.listdir("/proc/self/task"))
    {kernel}
    print(len(os.listdir("/proc/self/task")) - before)

torch.set_num_threads(2)
for limit in (torch.get_num_threads, compute_on_one_thread):
    thread = threading.Thread(target=count, args=(limit,))
    thread.start()
    thread.join()
"""
