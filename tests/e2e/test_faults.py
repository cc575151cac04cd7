"""What breaks under a server that works: what was accepted ends or is reported, and nothing stays behind.

One server lives through all of it, in this order: its sandbox is killed, its engine, its database is cut off,
its disk is full, its engine hangs; in the end somebody presses Ctrl-C.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest
from sqlalchemy.engine import make_url

from app.limits.limit import Limit
from app.settings import Settings
from app.storage.database import Database
from app.storage.jobs.store import JobStore
from nnsight_engine.remote_backend.frames import FrameKind, FrameReader
from nnsight_engine.remote_backend.messages import MEDIA_TYPE
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.databases import Postgres, programs
from tests.e2e.faults import (
    Proxy,
    Shared,
    engine_processes,
    files_in,
    filled,
    hang,
    held,
    kill,
    sandbox_processes,
    small_disk,
)
from tests.e2e.keyed import OPERATOR, STRANGER, keys_in
from tests.e2e.server import Server
from tests.e2e.test_traces_http import endless
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.timeout(600)]

PROMPT: Final = "The Eiffel Tower is in the city of"
CODE: Final = {"op": "trace", "code": "h = model.layers[5].output.float().save()", "name": "t"}
CAPTURE: Final = {"op": "capture", "at": ["layers.3.output"], "name": "c"}
LONG: Final = 900
_DISK_BYTES: Final = 24 * 2**20
_READY_S: Final = 120.0
_INTERRUPTED: Final = 130


@dataclasses.dataclass
class Streamed:
    """A stream: its events so far, and whether there is one."""

    events: list[str] = dataclasses.field(default_factory=list)
    begun: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def end(self) -> tuple[str, str]:
        """Whether it ended as all do, and the code of its error."""
        *_, before, last = self.events
        return last, str(json.loads(before).get("error", {}).get("code", ""))


class Faulty:
    """The server, its places, and two keys."""

    def __init__(self, server: Server, keys: tuple[str, str], disk: Path, temporary: Path) -> None:
        self.server, self.disk, self.temporary = server, disk, temporary
        self.is_small = os.path.ismount(disk)
        self.proxy: Proxy | None = None
        self.database_url = ""
        self.shared = Shared(server.process.pid)
        self.pool = ThreadPoolExecutor(16)
        trusted, stranger = ({"authorization": f"Bearer {key}"} for key in keys)
        self.client = httpx.Client(base_url=server.base_url, headers=trusted, timeout=120)
        self.stranger = httpx.Client(base_url=server.base_url, headers=stranger, timeout=120)
        self.expected = self.text()

    @property
    def pid(self) -> int:
        return self.server.process.pid

    def complete(self, client: httpx.Client | None = None, **body: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body}
        return (client or self.client).post("/v1/completions", json=body)

    def text(self) -> str:
        answer = self.complete()
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def streamed(self, **body: Any) -> tuple[Streamed, Future[None]]:
        stream = Streamed()
        body = {"prompt": PROMPT, "max_tokens": LONG, "min_tokens": LONG, "stream": True, **body}

        def read() -> None:
            with self.client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line:
                        stream.events.append(line.removeprefix("data: "))
                        stream.begun.set()

        reading = self.pool.submit(read)
        assert stream.begun.wait(60)
        return stream, reading

    def submit(self, trace: bytes, **params: Any) -> str:
        headers = {"content-type": MEDIA_TYPE}
        answer = self.client.post("/v1/jobs", content=trace, params=params, headers=headers)
        assert answer.status_code in {200, 202}, answer.text
        job_id: str = answer.json()["id"]
        return job_id

    def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self.client.get(f"/v1/jobs/{job_id}").json()
        return job

    def until_job(self, job_id: str, *statuses: str) -> dict[str, Any]:
        wait_for(lambda: self.job(job_id)["status"] in statuses, 90)
        return self.job(job_id)

    def is_ready(self) -> bool:
        return self.client.get("/health/ready").status_code == 200

    def code_of(self, answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json().get("error", {}).get("code", "")

    def sandboxed(self) -> tuple[int, str]:
        return self.code_of(self.complete(self.stranger, max_tokens=1, interventions=[CODE]))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faults")
    # Paths of sockets are short, and what sandboxes are forked from is another user.
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as temporary,
        small_disk(folder / "disk", _DISK_BYTES),
        contextlib.ExitStack() as stack,
    ):
        os.chmod(temporary, 0o711)
        disk = folder / "disk"
        proxy, direct, url = None, "", ""
        if programs() is not None:  # else on SQLite, and the test of its loss is skipped
            postgres: Postgres = request.getfixturevalue("postgres")
            direct = postgres.fresh()
            parsed = make_url(direct)
            proxy = Proxy(str(parsed.query["unix_sock"]))
            url = f"postgresql://{parsed.username}@127.0.0.1:{proxy.port}/{parsed.database}"
        environment = {
            "TMPDIR": temporary,
            "NNSIGHT_ENGINE_DATA_DIR": str(disk / "data"),
            "NNSIGHT_ENGINE_RESULT_DIR": str(disk / "results"),
            "NNSIGHT_ENGINE_DATABASE_URL": url,
            "NNSIGHT_ENGINE_INLINE_TENSOR_BYTES": "1",
            "NNSIGHT_ENGINE_RESULT_STORE_BYTES": str(_DISK_BYTES),
            "NNSIGHT_ENGINE_MAX_ENGINE_RESTARTS": "3",
            "NNSIGHT_ENGINE_DRAIN_TIMEOUT_S": "15",
            "NNSIGHT_ENGINE_ENGINE_STALL_TIMEOUT_S": "8",
            "NNSIGHT_ENGINE_MAX_SANDBOXES": "2",
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NNSIGHT_ENGINE_DATABASE_URL", url)
            keys = keys_in(disk / "data", acme=OPERATOR, stranger=STRANGER)
        server = stack.enter_context(
            Server(arguments=["--max-model-len", "1024"], environment=environment, ready_timeout_s=_READY_S)
        )
        faulty = Faulty(server, (keys["acme"], keys["stranger"]), disk, Path(temporary))
        faulty.proxy, faulty.database_url = proxy, direct
        yield faulty


@pytest.fixture(scope="module")
def trace(faulty: Faulty, bundled: Path) -> bytes:
    outline = faulty.client.get("/v1/traces/outline").json()
    return endless(VLLM(str(bundled)), outline, max_tokens=90, min_tokens=90).to_bytes()


def test_a_killed_sandbox_costs_its_own_request_at_most(faulty: Faulty) -> None:
    wait_for(lambda: faulty.sandboxed() == (200, ""), 90)
    stream, reading = faulty.streamed(max_tokens=60, min_tokens=60)
    kill(*sandbox_processes(faulty.pid))
    status, code = faulty.sandboxed()
    assert status == 200 or code in {"sandbox_missing", "intervention_failed", "trace_failed", "block_failed"}
    reading.result(60)
    assert stream.end == ("[DONE]", "")
    assert faulty.text() == faulty.expected
    wait_for(lambda: faulty.sandboxed() == (200, ""), 90)


def test_a_killed_engine_costs_what_ran_on_it_and_another_one_serves(faulty: Faulty, trace: bytes) -> None:
    again, once = faulty.submit(trace, rerun="true"), faulty.submit(trace)
    streams = [faulty.streamed() for _ in range(2)]
    streams.append(faulty.streamed(interventions=[CAPTURE]))
    wholes = [faulty.pool.submit(faulty.complete, max_tokens=LONG, min_tokens=LONG) for _ in range(2)]
    waited = faulty.pool.submit(
        faulty.client.post, "/v1/traces", content=trace, headers={"content-type": MEDIA_TYPE}
    )
    for job_id in (again, once):
        faulty.until_job(job_id, "RUNNING")
    time.sleep(0.5)
    faulty.shared.look()
    kill(*engine_processes(faulty.pid))
    futures: list[Future[Any]] = [*(reading for _, reading in streams), *wholes, waited]
    done, _ = concurrent.futures.wait(futures, timeout=60)
    assert len(done) == len(futures)
    for stream, reading in streams:
        reading.result()
        assert stream.end == ("[DONE]", "engine_dead")
    for whole in wholes:
        answer = whole.result()
        assert faulty.code_of(answer) == (503, "engine_dead")
        assert int(answer.headers["retry-after"]) > 0
    *_, last = FrameReader(2**30).feed(waited.result().content)
    assert (last.kind, last.json()["error"]["code"]) == (FrameKind.ERROR, "engine_dead")
    # The server lives, says how it is, and takes nothing that it could not do.
    assert faulty.client.get("/health/live").json() == {"status": "restarting"}
    assert faulty.code_of(faulty.client.get("/health/ready")) == (503, "engine_restarting")
    assert faulty.code_of(faulty.complete()) == (503, "engine_restarting")
    wait_for(faulty.is_ready, _READY_S)
    assert faulty.text() == faulty.expected
    assert faulty.until_job(again, "COMPLETED", "ERROR")["attempt"] == 2
    assert faulty.job(again)["status"] == "COMPLETED"
    failed = faulty.job(once)
    assert (failed["status"], failed["error"]["code"]) == ("ERROR", "engine_dead")
    assert faulty.client.post(f"/v1/jobs/{once}/rerun").status_code == 202
    assert faulty.until_job(once, "COMPLETED", "ERROR")["status"] == "COMPLETED"
    wait_for(lambda: faulty.sandboxed() == (200, ""), 90)
    assert "nnsight_engine_engine_restarts_total 1.0" in faulty.client.get("/metrics").text
    status = faulty.client.get("/v1/status").json()
    assert (status["phase"], status["in_flight"], status["queued"]) == ("ready", 0, 0)


def test_a_database_that_cannot_be_reached_is_waited_for(
    faulty: Faulty, trace: bytes, request: pytest.FixtureRequest
) -> None:
    if faulty.proxy is None:
        request.getfixturevalue("postgres")  # which skips, or fails where it is required
        raise AssertionError("PostgreSQL is there and was not used")
    running = faulty.submit(trace)
    faulty.until_job(running, "RUNNING")
    stream, reading = faulty.streamed(max_tokens=40, min_tokens=40)
    faulty.proxy.cut()
    answer = faulty.client.post("/v1/jobs", content=trace, headers={"content-type": MEDIA_TYPE})
    assert faulty.code_of(answer) == (503, "database_unavailable")
    reading.result(60)
    assert stream.end == ("[DONE]", "")
    assert faulty.is_ready()
    time.sleep(2)
    faulty.proxy.restore()
    assert faulty.until_job(running, "COMPLETED", "ERROR")["status"] == "COMPLETED"
    assert faulty.until_job(faulty.submit(trace), "COMPLETED", "ERROR")["status"] == "COMPLETED"


def test_a_full_disk_is_said_so_and_nothing_half_is_left(faulty: Faulty, trace: bytes) -> None:
    """Without a disk of its own, what results may take is what is too small."""
    kept = faulty.complete(interventions=[CAPTURE])
    url = kept.text.split('"url":"')[1].split('"')[0]
    before = _files(faulty.disk)
    if not faulty.is_small:
        large = {"op": "capture", "at": ["layers.*.output"], "name": "c"}
        answer = faulty.complete(prompt=PROMPT * 60, interventions=[large])
        assert faulty.code_of(answer) == (400, "capture_too_large")
        assert _files(faulty.disk) == before
        return
    with filled(faulty.disk):
        assert faulty.code_of(faulty.complete(interventions=[CAPTURE])) == (503, "engine_capture_full")
        assert faulty.text() == faulty.expected
        answer = faulty.client.post("/v1/jobs", content=trace, headers={"content-type": MEDIA_TYPE})
        assert faulty.code_of(answer) == (503, "job_store_full")
        # What was there, is.
        assert faulty.client.get(url).status_code == 200
    assert _files(faulty.disk) == before
    assert faulty.complete(interventions=[CAPTURE]).status_code == 200
    assert faulty.until_job(faulty.submit(trace), "COMPLETED", "ERROR")["status"] == "COMPLETED"


def test_an_engine_that_hangs_is_replaced_and_leaves_nothing(faulty: Faulty) -> None:
    before = _settled(faulty)
    assert before["shared memory"] > 0
    stream, reading = faulty.streamed()
    hang(*engine_processes(faulty.pid))
    wait_for(lambda: not faulty.is_ready(), 90)
    reading.result(60)
    assert stream.end == ("[DONE]", "engine_dead")
    wait_for(faulty.is_ready, _READY_S)
    wait_for(lambda: faulty.sandboxed() == (200, ""), 90)
    assert faulty.text() == faulty.expected
    wait_for(lambda: _held(faulty)["processes"] == before["processes"], 90)
    after = _settled(faulty)
    # Connections to the database come and go.
    descriptors = (before.pop("descriptors"), after.pop("descriptors"))
    assert after == before, files_in(faulty.temporary)
    assert abs(descriptors[1] - descriptors[0]) <= 4


def test_ctrl_c_under_load_loses_nothing(faulty: Faulty, trace: bytes) -> None:
    faulty.shared.look()
    assert faulty.shared.there
    given_back = faulty.submit(trace, rerun="true")
    faulty.until_job(given_back, "RUNNING")
    long = faulty.streamed()
    # What the drain waits for is over soon on any machine: it has begun and is short.
    before = _in_flight(faulty)
    whole = faulty.pool.submit(faulty.complete, max_tokens=8, min_tokens=8)
    endless_one = faulty.pool.submit(faulty.complete, max_tokens=LONG, min_tokens=LONG)
    wait_for(lambda: whole.done() or _in_flight(faulty) >= before + 2)
    short = faulty.streamed(max_tokens=8, min_tokens=8)
    process = psutil.Process(faulty.pid)
    below = process.children(recursive=True)
    os.killpg(faulty.pid, signal.SIGINT)  # to all processes, as a terminal has it
    wait_for(lambda: faulty.client.get("/health/live").json() == {"status": "draining"}, 60)
    assert faulty.code_of(faulty.complete()) == (503, "draining")
    assert faulty.client.get("/health/ready").status_code == 503
    short[1].result(90)
    assert short[0].end == ("[DONE]", "")
    assert whole.result(90).status_code == 200
    long[1].result(90)
    assert long[0].end == ("[DONE]", "draining")
    assert faulty.code_of(endless_one.result(90)) == (503, "draining")
    assert faulty.server.process.wait(90) == _INTERRUPTED
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []
    assert files_in(faulty.temporary) == []
    assert _files(faulty.disk / "results") == []
    assert faulty.shared.there == []
    job = asyncio.run(_job_of(faulty, given_back))
    assert job in {"QUEUED", "COMPLETED"}


def _in_flight(faulty: Faulty) -> int:
    return int(faulty.client.get("/v1/status").json()["in_flight"])


async def _job_of(faulty: Faulty, job_id: str) -> str:
    database = Database(faulty.disk / "data", faulty.database_url)
    await database.start()
    try:
        store = JobStore(database, "", waiting=Limit("jobs", 1), ttl_s=Settings().job_ttl_s)
        return (await store.get(job_id, "acme")).status
    finally:
        await database.close()


def _settled(faulty: Faulty) -> dict[str, int]:
    """Return what the server holds when it holds no connection of ours but one."""
    faulty.stranger.close()
    headers = dict(faulty.client.headers)
    faulty.client.close()
    strangers = dict(faulty.stranger.headers)
    faulty.client = httpx.Client(base_url=faulty.server.base_url, headers=headers, timeout=120)
    faulty.stranger = httpx.Client(base_url=faulty.server.base_url, headers=strangers, timeout=120)
    assert faulty.text() == faulty.expected
    time.sleep(1)
    return _held(faulty)


def _held(faulty: Faulty) -> dict[str, int]:
    return held(faulty.pid, faulty.temporary, faulty.shared)


def _files(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(str(path) for path in found if not path.name.startswith("server.db"))
