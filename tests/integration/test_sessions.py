"""Sessions on vLLM with a fake engine: the processes around it, and hostile sessions."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from app.engine.trace_process_pool import TraceProcesses
from nnsight_engine.core.saves import save
from nnsight_engine.core.work_context import current_work
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.errors import RemoteError
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.collector import Collector, Span, collecting
from tests.fakes.results import MODEL
from tests.fakes.traces import FakeTraceEngine
from tests.integration import serving
from tests.integration.live import Leaving, listening
from tests.waiting import wait_for

pytestmark = pytest.mark.heavy


class Traces(FakeTraceEngine):
    """Notes which spans the engine's own are to be below."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: list[str] = []

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        work = current_work()
        self.parents.append("" if work is None else (work.trace_headers or {}).get("traceparent", ""))
        async with contextlib.aclosing(super().run_trace(request, job_id)) as frames:
            async for frame in frames:
                yield frame


class Served:
    """A server over a fake engine."""

    def __init__(self, url: str, traces: Traces, sessions: TraceProcesses, collector: Collector) -> None:
        self.url = url
        self.traces = traces
        self.collector = collector
        self.sessions = sessions
        self.model = VLLM(MODEL, remote=url)

    def check(self) -> None:
        """See that the next session runs."""
        model = self.model
        with model.session():
            with model.trace("a"):
                kept = save(1)
            done = save(2)
        assert (kept, done) == (5, 2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    traces = Traces()
    traces.behaviour.saves = {"kept": 5}
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        server = serving.Application(
            tmp_path_factory.mktemp("sessions"),
            traces={traces.name: traces},
            session_processes=1,
            max_queued_traces=0,
            otlp_endpoint=collector.url,
        )
        (sessions,) = server.context.processes
        with listening(server.app) as url:
            yield Served(url, traces, sessions, collector)


def test_its_traces_report_their_tier_and_are_in_its_span(served: Served) -> None:
    served.traces.behaviour.tier = "eager"
    before = len(served.traces.parents)
    served.check()
    served.traces.behaviour.tier = "tap"
    (parent,) = served.traces.parents[before:]
    _, trace_id, span_id, _ = parent.split("-")

    def ended() -> list[Span]:
        return [one for one in served.collector.of_trace(trace_id) if one.span_id == span_id]

    wait_for(lambda: bool(ended()))
    (span,) = ended()
    assert span.name == "POST /v1/traces"
    assert span.attributes["nnsight_engine.kind"] == "code"
    assert span.attributes["nnsight_engine.tier"] == "eager"


def test_a_client_that_leaves_ends_the_trace_as_well(served: Served) -> None:
    served.check()
    model, pids = served.model, served.sessions.pids
    served.traces.behaviour.hangs = True
    with pytest.raises(RemoteError, match="left"):
        with model.session(backend=RemoteBackend(transport=Leaving(served.url))):
            print("begun")
            with model.trace("a"):
                kept = save(1)
    wait_for(lambda: not served.traces.num_running)
    served.traces.behaviour.hangs = False
    wait_for(lambda: served.sessions.num_running == 0)
    served.check()
    assert served.sessions.pids == pids
    with pytest.raises(NameError):
        _ = kept


def descriptors() -> list[int]:
    """Give what this process has open beside its standard streams."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]


def speak_later(file: str) -> None:
    """Say something after the session that has nothing to say any more; then tell so, by a file."""

    if os.fork():
        return
    time.sleep(0.2)
    for number in descriptors():
        with contextlib.suppress(OSError):
            os.write(number, b"\x01\x02\0\0\0\0\0\0\0{}")
    Path(file).touch()
    os._exit(0)


def test_what_a_session_leaves_behind_is_not_the_next_one_s(served: Served, tmp_path: Path) -> None:
    model, pids, told = served.model, served.sessions.pids, tmp_path / "told"
    file = str(told)
    with model.session():
        speak_later(file)
    wait_for(told.exists)
    served.check()
    assert served.sessions.pids != pids
    pids = served.sessions.pids
    with model.session():
        threading.Thread(target=time.sleep, args=(1000,)).start()
    served.check()
    assert served.sessions.pids != pids


def test_a_session_within_a_session_s_traces_is_refused(served: Served) -> None:
    model = served.model
    with pytest.raises(RemoteError, match="and nothing else"):
        with model.session():
            with model.session(backend=model._remote_backend()):  # noqa: SLF001 - as the session makes it
                kept = save(1)
    with pytest.raises(NameError):
        _ = kept
