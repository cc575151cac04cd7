"""Jobs over HTTP: accepted once, run once, in their turn, kept as they came, found again after a kill."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.jobs import Job
from nnsight_engine.remote_backend.frames import FrameKind
from tests.integration import command_server
from tests.integration.conftest import ErrorCheck, Serve
from tests.integration.scripted_traces import HEADERS, RESULT, Jobs, ScriptedEngine, frames_of, trace
from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(120)


@pytest.mark.both_databases
async def test_a_job_runs_and_its_result_is_what_a_trace_would_have_ended_with(with_jobs: Any):
    async with with_jobs() as jobs:
        response = await jobs.post(payload=b"p" * 1000)
        assert response.status_code == 202
        accepted = Job.model_validate(response.json())
        assert response.headers["location"] == f"/v1/jobs/{accepted.id}"
        assert (accepted.status, accepted.attempt, accepted.model) == ("QUEUED", 0, "fake-model")
        assert len(accepted.id) >= 22
        job = await jobs.end(accepted.id)
        assert (job.status, job.engine, job.attempt, job.error) == ("COMPLETED", "vllm", 1, None)
        assert job.request.model_dump().items() >= {"dialect": "vllm", "kind": "trace"}.items()
        assert job.created_at <= (job.started_at or 0) <= (job.finished_at or 0) < (job.expires_at or 0)
        assert jobs.engine.payloads == [b"p" * 100]
        result = await jobs.result(job.id)
        assert [frame.kind for frame in frames_of(result.content)] == [FrameKind.OUTPUTS, FrameKind.RESULT]
        assert frames_of(result.content)[1].data == RESULT
        assert int(result.headers["content-length"]) == job.result_bytes == len(result.content)
        statuses = [event["status"] for event in await jobs.events(job.id)]
        assert statuses == ["RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED"]


async def test_a_job_that_comes_when_the_engine_is_gone_waits_for_the_next(with_jobs: Any):
    async with with_jobs() as jobs:
        job = await jobs.end(await jobs.submit("gone"))
        assert (job.status, job.attempt) == ("COMPLETED", 2)
        assert len(jobs.engine.started) == 2


@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("refused", "wrong_width", "`vector` is \\ud800 too wide."),
        ("crash", "internal_error", "The server failed"),
        ("error-frame", "engine_capture_full", "no room"),
        ("no-result", "internal_error", "without a result"),
        ("dead", "engine_dead", "has stopped"),
    ],
)
async def test_a_job_that_fails_says_why_and_its_result_is_that(
    with_jobs: Any, script: str, code: str, message: str, caplog: pytest.LogCaptureFixture
):
    async with with_jobs() as jobs:
        job = await jobs.end(await jobs.submit(script))
        assert job.status == "ERROR"
        assert job.error is not None
        assert job.error.code == code
        assert message in job.error.message
        assert job.result_bytes is None
        [frame] = frames_of((await jobs.result(job.id)).content)
        assert frame.kind is FrameKind.ERROR
        assert frame.json()["error"]["code"] == code
        assert (await jobs.events(job.id))[-1]["message"] == job.error.message
        assert (await jobs.end(await jobs.submit())).status == "COMPLETED"
        if script == "crash":
            assert "secret" not in job.error.message
            assert "secret path" in caplog.text


async def test_a_block_that_fails_is_an_error_whose_result_is_there(with_jobs: Any):
    async with with_jobs() as jobs:
        job = await jobs.end(await jobs.submit("block-fails"))
        assert job.status == "ERROR"
        assert job.error is not None
        assert job.error.model_dump() == {
            "message": "ZeroDivisionError: division by zero",
            "code": "block_failed",
        }
        assert frames_of((await jobs.result(job.id)).content)[-1].data == RESULT
        statuses = [event["status"] for event in await jobs.events(job.id)]
        assert statuses.count("ERROR") == 1


async def test_prints_are_kept_in_order_but_not_without_end(with_jobs: Any):
    async with with_jobs() as jobs:
        job_id = await jobs.submit("logs:2000")
        lines = [event["message"] for event in await jobs.events(job_id) if event["status"] == "LOG"]
        assert lines == [f"line {count}" for count in range(2000)]
        many = await jobs.end(await jobs.submit("logs:20000"))
        assert many.num_events == 10_000 + 1 + 5
        assert "not kept" in (await jobs.events(many.id, 10_000))[-2]["message"]
        odd = await jobs.end(await jobs.submit("odd"))
        assert odd.status == "COMPLETED"
        [line] = [event["message"] for event in await jobs.events(odd.id) if event["status"] == "LOG"]
        assert line.startswith("a\\x00bxxx")
        assert len(line) == 64 * 1024


# What cannot be accepted.


async def test_what_is_no_trace_for_this_server_leaves_nothing(
    with_jobs: Any, error_of: ErrorCheck, tmp_path: Path
):
    async with with_jobs(max_trace_request_bytes=200_000) as jobs:
        for body, status, code in (
            (b"", 400, "invalid_trace"),
            (trace()[:-1], 400, "invalid_trace"),
            (trace() + b"x", 400, "invalid_trace"),
            (trace(model="other"), 404, "model_not_found"),
            (trace(dialect="transformers"), 400, "unsupported_combination"),
            (b"x" * 200_001, 413, "body_too_large"),
        ):
            error_of(await jobs.client.post("/v1/jobs", content=body, headers=HEADERS), status, code)
        assert (await jobs.client.get("/v1/jobs")).json()["data"] == []
        assert [path.name for path in (tmp_path / "data/jobs").iterdir()] == []
        assert [path.name for path in (tmp_path / "data/servers").glob("*/*")] == [".lock"]


async def test_jobs_are_taken_only_where_code_is(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs(allow_code=False) as jobs:
        error_of(await jobs.post(), 403, "code_not_allowed")


@pytest.mark.both_databases
async def test_the_queue_has_an_end(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs(max_running_jobs=1, max_queued_jobs=2) as jobs:
        first = await jobs.submit("hang", key="first")
        await jobs.until(first, "RUNNING")
        waiting = [await jobs.submit(key="a"), await jobs.submit()]
        assert (await jobs.client.get("/v1/status")).json()["queued"] == 2
        for key in (None, "new"):
            response = await jobs.post(key=key)
            error_of(response, 429, "queue_full")
            assert int(response.headers["retry-after"]) > 0
        # What is there already is found all the same.
        assert (await jobs.post(key="a")).json()["id"] == waiting[0]
        jobs.engine.released.set()
        for job_id in waiting:
            await jobs.end(job_id)
        assert (await jobs.post()).status_code == 202


async def test_the_disk_is_not_filled(with_jobs: Any, error_of: ErrorCheck, tmp_path: Path):
    async with with_jobs(job_store_bytes=100_000) as jobs:
        error_of(await jobs.post(payload=bytes(200_000)), 503, "job_store_full")
        kept = await jobs.submit(payload=bytes(60_000))
        await jobs.end(kept)
        error_of(await jobs.post(payload=bytes(60_000)), 503, "job_store_full")
        job = await jobs.end(await jobs.submit("big:60000"))
        assert job.error is not None
        assert job.error.code == "job_store_full"
        assert [path.name for path in (tmp_path / "data/jobs" / job.id).iterdir()] == ["request"]
        assert (await jobs.client.delete(f"/v1/jobs/{kept}")).status_code == 204
        assert (await jobs.end(await jobs.submit("big:60000"))).status == "COMPLETED"


# Keys.


@pytest.mark.both_databases
async def test_a_key_names_one_request(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs() as jobs:
        first = await jobs.submit(key="mine")
        again = await jobs.post(key="mine")
        assert (again.status_code, again.json()["id"]) == (200, first)
        assert again.headers["location"] == f"/v1/jobs/{first}"
        await jobs.end(first)
        assert (await jobs.post(key="mine")).json()["id"] == first
        error_of(await jobs.post("logs:1", key="mine"), 409, "idempotency_conflict")
        assert (await jobs.client.delete(f"/v1/jobs/{first}")).status_code == 204
        second = await jobs.submit("logs:1", key="mine")
        await jobs.end(second)
        assert jobs.engine.started == [first, second]


@pytest.mark.both_databases
async def test_of_many_that_send_one_key_at_once_one_runs(with_jobs: Any):
    async with with_jobs() as jobs:
        responses = await asyncio.gather(*(jobs.post(key=f"key {count % 3}") for count in range(60)))
        assert sorted(response.status_code for response in responses) == [200] * 57 + [202] * 3
        assert len({response.json()["id"] for response in responses}) == 3
        for response in responses:
            await jobs.end(response.json()["id"])
        assert len(jobs.engine.started) == 3


async def test_keys_that_are_none(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs() as jobs:
        for key in ("", "x" * 256, "tab\t", "\x80"):
            headers = {**HEADERS, "Idempotency-Key": key.encode("latin-1")}
            answer = await jobs.client.post("/v1/jobs", content=trace(), headers=headers)
            error_of(answer, 422, "invalid_shape")


# Running.


@pytest.mark.both_databases
async def test_jobs_of_one_owner_run_in_the_order_in_which_they_came(with_jobs: Any):
    async with with_jobs(max_running_jobs=1) as jobs:
        ids = [await jobs.submit() for _ in range(20)]
        await jobs.end(ids[-1])
        assert jobs.engine.started == ids


@pytest.mark.both_databases
async def test_jobs_whose_engine_has_no_room_wait_in_their_order_and_hold_up_no_others(serve: Serve):
    busy, free = ScriptedEngine(), ScriptedEngine()
    busy.is_busy = True
    async with serve(traces={"vllm": busy, "local": free}, max_running_jobs=1) as server:
        jobs = Jobs(server, busy)
        ids = [await jobs.submit() for _ in range(3)]
        await wait_for_async(lambda: jobs.has_events(ids[0], 3))
        for _ in range(2):
            other = await jobs.end(await jobs.submit(dialect="transformers"))
            assert (other.status, busy.started) == ("COMPLETED", [])
        busy.is_busy = False
        for job_id in ids:
            assert (await jobs.end(job_id)).attempt == 1
        assert busy.started == ids
        events = await jobs.events(ids[0])
        assert [event["status"] for event in events] == [
            "RECEIVED", "QUEUED", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED",
        ]  # fmt: skip
        assert "queue is full" in events[2]["message"]
        assert [(await jobs.get(job_id)).num_events for job_id in ids] == [6, 5, 5]


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Jobs]:
    settings = {"NNSIGHT_ENGINE_MAX_RUNNING_JOBS": "3", "NNSIGHT_ENGINE_DRAIN_TIMEOUT_S": "0.2"}
    async with command_server.started(folder, RELEASE_FILE=str(folder / "release"), **settings) as process:
        await wait_for_async(process.ready)
        yield Jobs(process, None)


async def kill(server: Jobs) -> None:
    server.server.process.kill()
    await server.server.process.wait()


async def test_a_killed_server_finds_its_jobs_again(tmp_path: Path):
    async with started(tmp_path) as server:
        done = await server.submit("logs:3", key="done")
        failed = await server.submit("refused")
        cancelled = await server.submit("hang", key="cancelled")
        await server.until(cancelled, "RUNNING")
        await server.client.post(f"/v1/jobs/{cancelled}/cancel")
        for job_id in (done, failed, cancelled):
            await server.until(job_id, "COMPLETED", "ERROR", "CANCELLED")
        running = await server.submit("hang", key="running")
        again = await server.submit("hang", rerun=True)
        early = await server.submit("hang-early")
        await server.until(running, "RUNNING")
        await server.until(again, "RUNNING")
        await server.until(early, "DISPATCHED")
        # No room for these, so they wait; the last one's answer is hardly out.
        queued = [await server.submit("ok") for _ in range(20)]
        queued.append(await server.submit("ok", key="last"))
        await kill(server)
    half = tmp_path / "data/jobs" / running / "result.1"
    half.write_bytes(b"half a result")
    (tmp_path / "release").touch()

    async with started(tmp_path) as server:
        interrupted = await server.get(running)
        assert interrupted.status == "ERROR"
        assert interrupted.error is not None
        assert interrupted.error.code == "interrupted"
        assert not half.exists()
        for job_id in [*queued, early, again]:
            assert (await server.until(job_id, "COMPLETED", "ERROR")).status == "COMPLETED"
        assert [(await server.get(job_id)).attempt for job_id in (*queued, early, again)] == [1] * 21 + [
            2
        ] * 2
        assert [event["status"] for event in await server.events(again)] == [
            "RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED",
        ]  # fmt: skip
        assert (await server.get(done)).status == "COMPLETED"
        result = await server.client.get(f"/v1/jobs/{done}/result")
        assert frames_of(result.content)[-1].data == RESULT
        assert (await server.get(failed)).error is not None
        assert (await server.get(cancelled)).status == "CANCELLED"
        # What was accepted under a key is not run again.
        assert (await server.post("logs:3", key="done")).json()["id"] == done
        assert (await server.post("ok", key="last")).json()["id"] == queued[-1]
        assert (await server.post("hang", key="running")).json()["id"] == running
        answer = await server.client.post(f"/v1/jobs/{running}/rerun")
        assert answer.status_code == 202
        assert (await server.until(running, "COMPLETED", "ERROR")).status == "COMPLETED"
        listed = (await server.client.get("/v1/jobs", params={"limit": 100})).json()["data"]
        assert len({job["id"] for job in listed}) == 3 + 3 + len(queued)


@pytest.mark.heavy
async def test_uploads_that_a_crash_cut_off_are_removed(tmp_path: Path):
    def received() -> list[Path]:
        return [path for path in (tmp_path / "data/servers").glob("*/*") if path.name != ".lock"]

    async with started(tmp_path) as server:

        async def half() -> AsyncIterator[bytes]:
            yield trace(payload=bytes(5_000_000))[:3_000_000]
            await wait_for_async(lambda: len(received()) == 1)
            await kill(server)
            yield b""

        with pytest.raises(httpx.TransportError):
            await server.client.post("/v1/jobs", content=half(), headers=HEADERS)
    assert len(received()) == 1
    async with started(tmp_path) as server:
        assert (await server.client.get("/v1/jobs")).json()["data"] == []
        assert received() == []
        assert list((tmp_path / "data/jobs").iterdir()) == []
