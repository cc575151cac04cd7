"""A process that is begun before its purpose is known; what runs in it here needs no vLLM."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest

from nnsight_engine.vllm_backend import early_process
from nnsight_engine.vllm_backend.early_process import EarlyContext, EarlyProcess
from nnsight_engine.vllm_backend.processes import end_with_parent

ALONE = """
from nnsight_engine.vllm_backend import early_process
early_process._waiting = early_process.EarlyProcess(("json",), {})
print(early_process._waiting.pid, flush=True)
early_process.atexit.register(early_process.discard)
input()
"""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[EarlyProcess]:
    # Those of vLLM take seconds.
    waiting = EarlyProcess(("no.such.module", "sched", "colorsys"), {})
    monkeypatch.setattr(early_process, "_waiting", waiting)
    yield waiting
    early_process.discard()


def tell(file: str) -> None:
    answer = {
        "pid": os.getpid(),
        "imported": "colorsys" in sys.modules,
        "told": os.environ.get("TOLD_LATER"),
        "forgotten": os.environ.get("FORGOTTEN"),
        "interrupts": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }
    with open(file, "w", encoding="utf-8") as written:
        written.write(repr(answer))


def told(file: Any, context: EarlyContext) -> tuple[dict[str, Any], BaseProcess]:
    process = context.Process(target=tell, args=(str(file),), name="EngineCore")
    process.start()
    process.join(30)
    assert process.exitcode == 0
    return eval(file.read_text()), process


def test_the_first_process_is_the_one_that_waits_and_others_are_new(
    early: EarlyProcess, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLD_LATER", "yes")
    answer, process = told(tmp_path / "first", EarlyContext())
    assert process.pid == early.pid
    assert answer == {
        "pid": early.pid, "imported": True, "told": "yes", "forgotten": None, "interrupts": True,
    }  # fmt: skip
    monkeypatch.delenv("TOLD_LATER")
    answer, process = told(tmp_path / "second", EarlyContext())
    assert answer["pid"] == process.pid != early.pid
    assert answer["told"] is None
    assert not answer["imported"]


def test_variables_that_are_gone_are_gone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGOTTEN", "no")
    waiting = EarlyProcess((), {})
    monkeypatch.setattr(early_process, "_waiting", waiting)
    monkeypatch.delenv("FORGOTTEN")
    answer, _ = told(tmp_path / "answer", EarlyContext())
    assert (answer["pid"], answer["forgotten"]) == (waiting.pid, None)


@pytest.mark.parametrize("how", ["native variable", "killed", "open file"])
def test_where_it_cannot_stand_for_a_new_one_there_is_a_new_one(
    early: EarlyProcess, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "native variable":  # read when a process starts, by libraries
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    elif how == "killed":
        os.kill(early.pid, signal.SIGKILL)
        os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    if how == "open file":
        ours, theirs = connection.Pipe()
        given = EarlyContext().Process(target=theirs_is_open, args=(theirs,))
        given.start()
        assert ours.recv() == given.pid != early.pid
        given.join(30)
    else:
        answer, process = told(tmp_path / "answer", EarlyContext())
        assert answer["pid"] == process.pid != early.pid
    assert not psutil.pid_exists(early.pid)


def theirs_is_open(pipe: connection.Connection) -> None:
    pipe.send(os.getpid())


def wait_for_ever() -> None:
    end_with_parent()
    signal.pause()


def test_it_is_ended_and_told_of_like_any_other(early: EarlyProcess) -> None:
    process = EarlyContext().Process(target=wait_for_ever, daemon=True)
    process.start()
    assert process.pid == early.pid
    assert process.is_alive()
    process.terminate()
    process.join(30)
    assert process.exitcode == -signal.SIGTERM
    assert connection.wait([process.sentinel], 0) == [process.sentinel]


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_one_that_nobody_used_ends_with_its_parent(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        waiting = psutil.Process(int(parent.stdout.readline()))
        if how == "kill":
            parent.kill()
        parent.communicate("\n" if how == "exit" else None)
    _, alive = psutil.wait_procs([waiting], timeout=10)
    assert alive == []


def test_vllm_is_offered_it_only_where_it_would_spawn(
    early: EarlyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    of_vllm = utils.get_mp_context
    with early_process.offered():
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        assert utils.get_mp_context().get_start_method() == "fork"
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        assert isinstance(utils.get_mp_context(), EarlyContext)
    assert utils.get_mp_context is of_vllm
    assert not psutil.pid_exists(early.pid)  # nobody will come for it
