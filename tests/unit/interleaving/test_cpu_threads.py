"""Blocks compute on one CPU thread; the number that other threads use stays as it is."""

import json
import subprocess
import sys
from typing import Any

import pytest

_PROGRAM = """
import json, os, threading, torch
from nnsight_engine.interleaving.cpu_threads import compute_on_one_thread
from nnsight_engine.interleaving.threads import Threads

def on_a_thread(job):
    results = []
    thread = threading.Thread(target=lambda: results.append(job()))
    thread.start()
    thread.join()
    return results[0]

def started(limit):
    limit()
    before = set(os.listdir("/proc/self/task"))
    KERNEL
    return len(set(os.listdir("/proc/self/task")) - before)

torch.set_num_threads(4)
print(json.dumps({
    "limited": on_a_thread(lambda: started(compute_on_one_thread)),
    "not limited": on_a_thread(lambda: started(torch.get_num_threads)),
    "in a block": Threads(30.0).run(torch.get_num_threads),
    "here": torch.get_num_threads(),
    "on another thread": on_a_thread(torch.get_num_threads),
}))
"""


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("torch.ones(600, 600) @ torch.ones(600, 600)", id="matrix product"),
        pytest.param("torch.randn(10**6).sin()", id="MKL's own number"),
        pytest.param("torch.randn(10**6) + 1", id="parallel_for"),
    ],
)
def test_no_kernel_of_a_block_starts_threads(kernel: str) -> None:
    """A process of its own has no other reason to start threads, and torch's own ``set_num_threads``."""
    program = _PROGRAM.replace("KERNEL", kernel)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(process.stdout)
    assert found.pop("not limited") > 0
    assert found == {"limited": 0, "in a block": 1, "here": 4, "on another thread": 4}
