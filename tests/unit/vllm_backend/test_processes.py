"""Processes of an engine, real ones, and what becomes of them where the one that starts them is hit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import multiprocessing, os, signal, sys, threading, time
from nnsight_engine.vllm_backend.processes import end_with_parent, uninterrupted

def child(told):
    signal.signal(signal.SIGINT, lambda *_: os._exit(3))  # as vLLM's, which end by it
    end_with_parent()
    told.put(os.getpid())
    time.sleep(60)

def start(context, told):
    with uninterrupted():
        context.Process(target=child, args=(told,)).start()

if __name__ == "__main__":
    interrupts = []
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
    context = multiprocessing.get_context(sys.argv[1])
    told = context.SimpleQueue()
    # On a thread, as the server does.
    starting = threading.Thread(target=start, args=(context, told))
    starting.start()
    starting.join()
    print(told.get(), flush=True)
    while not interrupts:
        time.sleep(0.01)
    print("interrupted", flush=True)
    start(context, told)
    print(told.get(), flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["fork", "spawn"])
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(file), request.param],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_they_do_not_notice_ctrl_c_and_end_with_the_one_that_started_them(
    parent: subprocess.Popen[str],
) -> None:
    def said() -> str:
        assert parent.stdout is not None
        return parent.stdout.readline().strip()

    first = psutil.Process(int(said()))
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    assert said() == "interrupted"
    second = psutil.Process(int(said()))  # those that come later are like it
    os.killpg(parent.pid, signal.SIGINT)
    time.sleep(0.2)
    assert psutil.STATUS_ZOMBIE not in {first.status(), second.status()}
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([first, second], timeout=50)
    assert alive == []
