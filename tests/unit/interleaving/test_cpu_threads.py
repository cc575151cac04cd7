"""Blocks compute on one CPU thread; the number that other threads use stays as it is."""

import json
import subprocess
import sys
from typing import Any

_PROGRAM = """
import json, os, threading, torch
from nnsight_engine.interleaving.thread_state import compute_on_one_thread
from nnsight_engine.interleaving.threads import Threads

KERNELS = {
    "matrix product": lambda: torch.ones(600, 600) @ torch.ones(600, 600),
    "MKL's own number": lambda: torch.randn(10**6).sin(),
    "parallel_for": lambda: torch.randn(10**6) + 1,
}

def on_a_thread(job):
    results = []
    thread = threading.Thread(target=lambda: results.append(job()))
    thread.start()
    thread.join()
    return results[0]

def started(limit, kernel):
    limit()
    before = set(os.listdir("/proc/self/task"))
    kernel()
    return len(set(os.listdir("/proc/self/task")) - before)

torch.set_num_threads(4)
print(json.dumps({
    "limited": [on_a_thread(lambda: started(compute_on_one_thread, one)) for one in KERNELS.values()],
    "not limited": on_a_thread(lambda: started(torch.get_num_threads, KERNELS["matrix product"])),
    "in a block": Threads(30.0).run(torch.get_num_threads),
    "here": torch.get_num_threads(),
    "on another thread": on_a_thread(torch.get_num_threads),
}))
"""


def test_no_kernel_of_a_block_starts_threads() -> None:
    """A process of its own has no other reason to start threads, and torch's own ``set_num_threads``."""
    process = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(process.stdout)
    assert found.pop("not limited") > 0
    assert found.pop("limited") == [0, 0, 0]
    assert found == {"in a block": 1, "here": 4, "on another thread": 4}
