"""Traces of ``LanguageModel`` over HTTP: the client here, a real process with the model there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from api_schemas.errors import ErrorCode
from app.engine import trace_process_pool
from app.limits.limit import Limit
from nnsight_engine.core.saves import save
from nnsight_engine.core.work_context import UsageMeter, WorkContext
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.client.http import HttpTransport, Progress
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import MEDIA_TYPE, TraceRequest
from tests.integration.live import Leaving, Recording
from tests.integration.local_server import TEXT, LocalServer, serving_locally
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    os.environ["NNSIGHT_ENGINE_SECRET_FOR_TESTS"] = "secret"
    with serving_locally(tmp_path_factory.mktemp("local")) as served:
        yield served
        pid = served.pid
    del os.environ["NNSIGHT_ENGINE_SECRET_FOR_TESTS"]
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_trace_runs_there_as_here(served: LocalServer) -> None:
    model, transport = served.model, Recording(served.url)
    with model.trace(TEXT, backend=served.remote(transport=transport)):
        print("one", 1)
        print("unfinished", end="")
        hidden = model.layers[1].output.save()
        hidden.requires_grad_(True)
        with model.lm_head.output.sum().backward():
            grad = hidden.grad.save()
    local = LanguageModel(served.path, dispatch=True)
    with local.trace(TEXT):
        expected = local.layers[1].output.save()
        expected.requires_grad_(True)
        with local.lm_head.output.sum().backward():
            expected_grad = expected.grad.save()
    assert torch.equal(hidden, expected)
    assert torch.equal(grad, expected_grad)
    assert transport.logs == ["one 1", "unfinished"]
    states = [event["status"] for event in transport.heard]
    assert [one for one in states if one != "QUEUED"] == [
        "RECEIVED", "DISPATCHED", "RUNNING", "LOG", "LOG", "COMPLETED",
    ]  # fmt: skip
    assert model.lm_head.weight.is_meta


def test_prints_have_a_limit(served: LocalServer) -> None:
    model, transport = served.model, Recording(served.url)
    with model.trace(TEXT, backend=served.remote(transport=transport)):
        for number in range(40):
            print(str(number) * 50_000)
        done = save(True)
    assert done
    text = "\n".join(transport.logs)
    assert len(text) < 1.1 * 2**20
    assert "left out" in text


def test_a_process_knows_no_secrets(served: LocalServer) -> None:
    model = served.model
    with model.trace(TEXT, backend=served.remote()):
        names = save(sorted(os.environ))
        model.lm_head.output.save()
    assert "PATH" in names
    assert not [name for name in names if name.startswith("NNSIGHT_ENGINE")]


def test_changed_weights_do_not_reach_other_traces(served: LocalServer) -> None:
    model, transport, pid = served.model, Recording(served.url), served.pid
    with model.trace(TEXT, backend=served.remote(transport=transport)):
        with torch.no_grad():
            model.lm_head.weight.zero_()
        zeros = model.lm_head.output.abs().sum().save()
    assert zeros == 0
    assert "weights" in transport.logs[-1]
    served.check()
    assert served.pid != pid


@pytest.mark.parametrize(
    "way", ["exit", *(pytest.param(way, marks=pytest.mark.heavy) for way in ("signal", "babble"))]
)
def test_a_block_that_ends_the_process_fails_alone(served: LocalServer, way: str) -> None:
    model = served.model
    with pytest.raises(RemoteError, match="has ended") as caught:
        with model.trace(TEXT, backend=served.remote()):
            if way == "exit":
                os._exit(3)
            elif way == "signal":
                os.kill(os.getpid(), signal.SIGSEGV)
            else:
                for number in range(3, 4096):  # its number is that of the server's own end
                    with contextlib.suppress(OSError):
                        os.write(number, b"\x09" * 1000)
            model.lm_head.output.save()
    assert caught.value.code == ErrorCode.TRACE_PROCESS_ENDED
    if way == "exit":
        assert "exit status 3" in str(caught.value)
    served.check()


def test_a_client_that_leaves_ends_its_trace(served: LocalServer) -> None:
    served.check()
    model, pid = served.model, served.pid
    for way in ("sleeps", "computes"):
        with pytest.raises(RemoteError):
            with model.trace(TEXT, backend=served.remote(transport=Leaving(served.url))):
                print("begun")
                while True:
                    time.sleep(1000 if way == "sleeps" else 0)
        served.check()
    assert served.pid == pid


def test_a_trace_that_will_not_end_is_ended(served: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_process_pool, "CANCEL_GRACE_S", 0.3)
    monkeypatch.setattr(served.engine, "time_limit_s", 0.5)
    model, pid = served.model, served.pid
    with pytest.raises(RemoteError, match="trace_time_limit_s") as caught:
        with model.trace(TEXT, backend=served.remote()):
            while True:
                try:
                    time.sleep(10)
                except BaseException:  # noqa: BLE001 - it is what is tested
                    continue
    assert caught.value.code == ErrorCode.TRACE_TIMED_OUT
    wait_for(lambda: not is_alive(pid))
    monkeypatch.setattr(served.engine, "time_limit_s", 60)
    served.check()
    pid = served.pid
    monkeypatch.undo()
    monkeypatch.setattr(served.engine, "time_limit_s", 0.5)
    with pytest.raises(RemoteError, match="trace_time_limit_s"):
        with model.trace(TEXT, backend=served.remote()):
            time.sleep(1000)
    monkeypatch.setattr(served.engine, "time_limit_s", 60)
    served.check()
    assert served.pid == pid


def test_a_waiting_trace_is_notified_and_the_queue_is_bounded(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "waiting", Limit("queued traces", 1))
    transports = [Recording(served.url) for _ in range(2)]

    def run(transport: Recording, pause_s: float) -> None:
        client = LanguageModel(served.path)
        with client.trace(TEXT, backend=served.remote(transport=transport)):
            time.sleep(pause_s)
            client.lm_head.output.save()

    threads = [
        threading.Thread(target=run, args=(one, pause)) for one, pause in zip(transports, (2, 0), strict=True)
    ]
    threads[0].start()
    wait_for(lambda: any(one["status"] == "RUNNING" for one in transports[0].heard))
    threads[1].start()
    wait_for(lambda: served.engine.num_waiting == 1)
    request = capture(served)
    answer = httpx.post(f"{served.url}/v1/traces", content=request, headers={"content-type": MEDIA_TYPE})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    for thread in threads:
        thread.join()
    queued = [one["message"] for one in transports[1].heard if one["status"] == "QUEUED"]
    assert queued == ["1 before this one"]


def test_the_time_that_a_trace_holds_the_engine_is_counted(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = UsageMeter("key")
    monkeypatch.setattr(trace_process_pool, "current_work", lambda: WorkContext(meter=meter))
    model = served.model
    with model.trace(TEXT, backend=served.remote()):
        time.sleep(0.3)
        model.lm_head.output.save()
    wait_for(lambda: meter.intervention_s > 0)
    assert 0.3 <= meter.intervention_s < 30


def capture(served: LocalServer) -> bytes:
    """Return a trace's bytes."""
    sent: list[bytes] = []

    class Kept(HttpTransport):
        def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
            sent.append(request.to_bytes())
            raise RemoteError("kept")

    model = served.model
    with pytest.raises(RemoteError, match="kept"):
        with model.trace(TEXT, backend=served.remote(transport=Kept(served.url))):
            model.lm_head.output.save()
    return sent[0]


KILLED = """
import asyncio, os, sys
from app.engine.process_engines import LocalTraceEngine
from app.process_environment import environment_for_traces
from app.settings import Settings
from nnsight_engine.local_engine.trace_process import ProcessOptions

async def main():
    engine = LocalTraceEngine(ProcessOptions(model=sys.argv[1]), Settings(), environment_for_traces())
    engine.start()
    while not engine.pids:
        await asyncio.sleep(0.01)
    print(engine.pids[0], flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.heavy
def test_a_process_does_not_outlive_its_server(served: LocalServer) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(served.path)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    assert is_alive(pid)
    server.kill()
    server.wait()
    server.stdout.close()
    wait_for(lambda: not is_alive(pid))
