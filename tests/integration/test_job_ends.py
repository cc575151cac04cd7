"""How jobs over HTTP end: cancelled, removed, expired, run again, fetched, drained, refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.jobs import Job
from app.admission.rates import Rates
from app.auth.keys import Keys
from app.auth.principal import Principal
from app.services.jobs import runner
from app.storage.jobs.store import JobStore
from app.storage.tables import JobRow
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Serve
from tests.integration.scripted_traces import HEADERS, frames_of, trace
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async


@pytest.mark.both_databases
@pytest.mark.parametrize("script", ["hang", "hang-early"])
async def test_a_running_job_is_cancelled_and_its_engine_notified(
    with_jobs: Any, script: str, jobs_folder: Path
):
    async with with_jobs() as jobs:
        job_id = await jobs.submit(script)
        await jobs.until(job_id, "RUNNING" if script == "hang" else "DISPATCHED")
        answer = await jobs.client.post(f"/v1/jobs/{job_id}/cancel")
        assert answer.json()["cancel_requested"] is True
        job = await jobs.end(job_id)
        assert (job.status, job.error.code if job.error else "") == ("CANCELLED", "job_cancelled")
        assert (jobs.engine.num_running, jobs.engine.num_ended) == (0, 1)
        [frame] = frames_of((await jobs.result(job_id)).content)
        assert frame.json()["error"]["code"] == "job_cancelled"
        assert [path.name for path in (jobs_folder / job_id).iterdir()] == ["request"]
        # Whoever cancels it again finds it cancelled.
        again = await jobs.client.post(f"/v1/jobs/{job_id}/cancel")
        assert (again.status_code, again.json()["status"]) == (200, "CANCELLED")
        assert [event["status"] for event in await jobs.events(job_id)].count("CANCELLED") == 1


@pytest.mark.both_databases
async def test_a_waiting_job_is_cancelled_and_never_runs(with_jobs: Any):
    async with with_jobs(max_running_jobs=1) as jobs:
        first = await jobs.submit("hang")
        await jobs.until(first, "RUNNING")
        second = await jobs.submit()
        answer = await jobs.client.post(f"/v1/jobs/{second}/cancel")
        assert answer.json()["status"] == "CANCELLED"
        jobs.engine.released.set()
        await jobs.end(first)
        assert jobs.engine.started == [first]


@pytest.mark.both_databases
async def test_a_job_whose_caller_cannot_be_looked_up_runs_later_and_counts_one_attempt(
    with_jobs: Any, monkeypatch: pytest.MonkeyPatch
):
    look_up, put_back = Keys.holder, JobStore.requeue
    failures, later_failures = iter([OSError("no database")]), iter([OSError("still none")] * 2)

    async def failing_once(keys: Keys, key_id: str) -> Principal | None:
        for failure in failures:
            raise failure
        return await look_up(keys, key_id)

    async def failing_twice(store: JobStore, job: JobRow, **how: bool) -> None:
        for failure in later_failures:
            raise failure
        await put_back(store, job, **how)

    monkeypatch.setattr(Keys, "holder", failing_once)
    monkeypatch.setattr(JobStore, "requeue", failing_twice)
    monkeypatch.setattr(runner, "_MAX_HOLD_S", 0.1)
    monkeypatch.setattr(runner, "_LOOK_S", 0.1)
    async with with_jobs() as jobs:
        job = await jobs.end(await jobs.submit())
        assert (job.status, job.attempt, jobs.engine.started) == ("COMPLETED", 1, [job.id])
        assert [next(left, None) for left in (failures, later_failures)] == [None, None]


async def test_a_job_that_could_not_begin_runs_later_and_counts_one_attempt(
    with_jobs: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "_MAX_HOLD_S", 0.1)
    async with with_jobs() as jobs:
        parts, failures = jobs.server.context.jobs.runner._parts, iter([ValueError("no span")])  # noqa: SLF001
        watch = parts.watch

        def failing_once(*run: Any) -> Any:
            for failure in failures:
                raise failure
            return watch(*run)

        parts.watch = failing_once
        job = await jobs.end(await jobs.submit())
        assert (job.status, job.attempt, jobs.engine.started) == ("COMPLETED", 1, [job.id])
        assert next(failures, None) is None


async def test_a_finished_job_stays_finished(with_jobs: Any):
    async with with_jobs() as jobs:
        job = await jobs.end(await jobs.submit())
        answer = await jobs.client.post(f"/v1/jobs/{job.id}/cancel")
        assert Job.model_validate(answer.json()) == job
        assert (await jobs.result(job.id)).status_code == 200


@pytest.mark.both_databases
async def test_cancelling_at_any_moment_leaves_each_job_ended_once(with_jobs: Any):
    async with with_jobs(max_running_jobs=4) as jobs:
        ids = [await jobs.submit("logs:20") for _ in range(40)]

        async def cancel(job_id: str, turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            assert (await jobs.client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200

        await asyncio.gather(*(cancel(job_id, 7 * count) for count, job_id in enumerate(ids)))
        for job_id in ids:
            job = await jobs.end(job_id)
            statuses = [event["status"] for event in await jobs.events(job_id)]
            assert [status in {"COMPLETED", "CANCELLED", "ERROR"} for status in statuses].count(True) == 1
            assert statuses[-1] == job.status != "ERROR"
            assert (job.result_bytes is not None) == (job.status == "COMPLETED")
        await jobs.server.until_idle()
        assert jobs.engine.num_running == 0


@pytest.mark.both_databases
@pytest.mark.parametrize("script", ["ok", "hang"])
async def test_a_removed_job_is_gone_with_its_files(
    with_jobs: Any, error_of: ErrorCheck, jobs_folder: Path, script: str
):
    async with with_jobs() as jobs:
        job_id = await jobs.submit(script)
        await jobs.until(job_id, "RUNNING" if script == "hang" else "COMPLETED")
        assert (await jobs.client.delete(f"/v1/jobs/{job_id}")).status_code == 204
        for path in ("", "/result", "/events"):
            error_of(await jobs.client.get(f"/v1/jobs/{job_id}{path}"), 404, "job_not_found")
        error_of(await jobs.client.delete(f"/v1/jobs/{job_id}"), 404, "job_not_found")
        assert (await jobs.client.get("/v1/jobs")).json()["data"] == []
        await jobs.server.until_idle()
        assert jobs.engine.num_running == 0
        assert os.listdir(jobs_folder) == []


@pytest.mark.both_databases
async def test_a_job_expires_some_time_after_its_end(with_jobs: Any, error_of: ErrorCheck, jobs_folder: Path):
    async with with_jobs(job_ttl_s=0.2) as jobs:
        running = await jobs.submit("hang")
        job = await jobs.end(await jobs.submit())

        async def is_gone() -> bool:
            response: httpx.Response = await jobs.client.get(f"/v1/jobs/{job.id}")
            return response.status_code == 404

        await wait_for_async(is_gone)
        error_of(await jobs.result(job.id), 404, "job_not_found")
        assert (await jobs.get(running)).status == "RUNNING"
        # Its files go right after it.
        await wait_for_async(lambda: [path.name for path in jobs_folder.iterdir()] == [running])


@pytest.mark.both_databases
async def test_a_job_that_failed_runs_again_and_its_history_goes_on(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs() as jobs:
        job_id = await jobs.submit("hang")
        error_of(await jobs.client.post(f"/v1/jobs/{job_id}/rerun"), 409, "job_not_rerunnable")
        await jobs.until(job_id, "RUNNING")
        await jobs.client.post(f"/v1/jobs/{job_id}/cancel")
        await jobs.end(job_id)
        jobs.engine.released.set()
        answer = await jobs.client.post(f"/v1/jobs/{job_id}/rerun")
        assert answer.status_code == 202
        assert (answer.json()["status"], answer.json()["error"]) == ("QUEUED", None)
        job = await jobs.end(job_id)
        assert (job.status, job.attempt) == ("COMPLETED", 2)
        events = await jobs.events(job_id)
        assert [event["id"] for event in events] == list(range(1, len(events) + 1))
        assert [event["status"] for event in events][4:6] == ["CANCELLED", "QUEUED"]
        error_of(await jobs.client.post(f"/v1/jobs/{job_id}/rerun"), 409, "job_not_rerunnable")
        failed = await jobs.end(await jobs.submit("block-fails"))
        await jobs.client.post(f"/v1/jobs/{failed.id}/rerun")
        assert (await jobs.until(failed.id, "ERROR")).attempt == 2


# Reading.


@pytest.mark.both_databases
async def test_lists_are_paged_from_the_newest(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs() as jobs:
        ids = [await jobs.submit("refused" if count % 2 else "ok") for count in range(7)]
        for job_id in ids:
            await jobs.end(job_id)
        seen: list[str] = []
        params: dict[str, Any] = {"limit": 3}
        while True:
            page = (await jobs.client.get("/v1/jobs", params=params)).json()
            assert page["object"] == "list"
            seen += [job["id"] for job in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], seen[-1])
            if not page["has_more"]:
                break
            params["after"] = page["last_id"]
        assert seen == ids[::-1]
        failed = (await jobs.client.get("/v1/jobs", params={"status": "ERROR"})).json()
        assert [job["id"] for job in failed["data"]] == ids[1::2][::-1]
        error_of(await jobs.client.get("/v1/jobs", params={"after": "nobody"}), 404, "job_not_found")
        for bad in ({"limit": 0}, {"limit": 101}, {"status": "LOST"}, {"after": "x" * 65}):
            error_of(await jobs.client.get("/v1/jobs", params=bad), 422, "invalid_shape")


@pytest.mark.both_databases
async def test_a_job_that_is_not_there(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs() as jobs:
        for job_id in ("nobody", "..%2f..", "%00", "é", "x" * 5000):
            for method, path in [
                ("GET", ""), ("DELETE", ""), ("GET", "/result"), ("GET", "/events"), ("POST", "/cancel"),
                ("POST", "/rerun"),
            ]:  # fmt: skip
                response = await jobs.client.request(method, f"/v1/jobs/{job_id}{path}")
                assert response.status_code == 404, (job_id, path)
        error_of(await jobs.client.get("/v1/jobs/nobody"), 404, "job_not_found")


async def test_the_result_of_a_job_that_runs_is_not_there_yet(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs() as jobs:
        response = await jobs.result(await jobs.submit("hang"))
        error_of(response, 409, "job_not_finished")
        assert int(response.headers["retry-after"]) > 0


async def test_a_result_missing_from_the_disk_is_reported(
    with_jobs: Any, error_of: ErrorCheck, jobs_folder: Path
):
    async with with_jobs() as jobs:
        job = await jobs.end(await jobs.submit())
        (jobs_folder / job.id / "result.1").unlink()
        error_of(await jobs.result(job.id), 404, "result_not_found")


async def test_a_download_goes_on_where_it_broke_off(with_jobs: Any, error_of: ErrorCheck):
    async with with_jobs() as jobs:
        job_id = (await jobs.end(await jobs.submit("big:3000000"))).id
        whole = await jobs.result(job_id)
        size, tag = len(whole.content), whole.headers["etag"]
        for text, start, stop in [
            ("bytes=0-", 0, size),
            ("bytes=10-19", 10, 20),
            ("bytes=1500000-", 1_500_000, size),
            ("bytes=-7", size - 7, size),
            (f"bytes=5-{size * 2}", 5, size),
        ]:
            part = await jobs.result(job_id, Range=text)
            assert part.status_code == (200 if stop - start == size else 206), text
            assert part.content == whole.content[start:stop], text
            if part.status_code == 206:
                assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        for text in (f"bytes={size}-", "bytes=-0"):
            late = await jobs.result(job_id, Range=text)
            error_of(late, 416, "range_not_satisfiable")
            assert late.headers["content-range"] == f"bytes */{size}"
        for text in ("bytes=", "bytes=-", "bytes=9-1", "lines=1-2", "bytes=1-2,4-5", "bytes=\u00b2-"):
            assert (await jobs.result(job_id, Range=text.encode("latin-1"))).status_code == 200, text
        assert (await jobs.result(job_id, Range="bytes=5-9", **{"If-Range": tag})).status_code == 206
        assert (await jobs.result(job_id, Range="bytes=5-9", **{"If-Range": '"x"'})).status_code == 200


# Phases.


async def test_jobs_wait_for_the_engine_and_are_read_in_every_phase(with_jobs: Any, error_of: ErrorCheck):
    behaviour = FakeBehaviour()
    async with with_jobs(behaviour, max_running_jobs=1) as jobs:
        done = await jobs.end(await jobs.submit())
        await jobs.submit("hang")
        waiting = await jobs.submit()
        refusals = [("is_starting", "starting"), ("is_dead", "engine_restarting")]
        for flag, code in refusals:
            setattr(behaviour, flag, True)
            error_of(await jobs.post(), 503, code)
            error_of(await jobs.client.post(f"/v1/jobs/{done.id}/rerun"), 503, code)
            assert (await jobs.result(done.id)).status_code == 200
            assert len(await jobs.events(done.id)) == 5
            assert (await jobs.get(waiting)).status == "QUEUED"
            setattr(behaviour, flag, False)
        jobs.server.context.lifecycle.begin_drain()
        error_of(await jobs.post(), 503, "draining")
        assert (await jobs.client.get("/v1/jobs")).status_code == 200
        assert (await jobs.client.post(f"/v1/jobs/{waiting}/cancel")).json()["status"] == "CANCELLED"


async def test_while_it_drains_running_jobs_end_and_others_do_not_begin(with_jobs: Any, serve: Serve):
    async with with_jobs(max_running_jobs=1, drain_timeout_s=10) as jobs:
        running = await jobs.submit("hang")
        await jobs.until(running, "RUNNING")
        waiting = await jobs.submit("hang")
        jobs.server.context.lifecycle.begin_drain()
        asyncio.get_running_loop().call_later(0.1, jobs.engine.released.set)
    assert jobs.engine.started == [running]
    async with with_jobs() as jobs:
        jobs.engine.released.set()
        assert (await jobs.get(running)).status == "COMPLETED"
        assert (await jobs.end(waiting)).status == "COMPLETED"
        assert jobs.engine.started == [waiting]


@pytest.mark.both_databases
async def test_what_a_drain_cannot_wait_for_runs_at_the_next_start(with_jobs: Any):
    async with with_jobs(drain_timeout_s=0.05) as jobs:
        ids = [await jobs.submit(script) for script in ("hang", "hang-early")]
        await jobs.until(ids[0], "RUNNING")
        await jobs.until(ids[1], "DISPATCHED")
    assert (jobs.engine.num_running, jobs.engine.num_ended) == (0, 2)
    async with with_jobs() as jobs:
        jobs.engine.released.set()
        for job_id in ids:
            job = await jobs.end(job_id)
            assert (job.status, job.attempt) == ("COMPLETED", 2)
            assert "stopped" in str((await jobs.events(job_id))[-4].get("message"))


async def test_a_job_of_another_model_is_left_to_its_servers(with_jobs: Any, monkeypatch: Any):
    async with with_jobs(max_running_jobs=1) as jobs:
        await jobs.submit("hang")
        waiting = await jobs.submit()
    monkeypatch.setattr("tests.fakes.engine.MODEL", "another-model")
    async with with_jobs() as jobs:
        jobs.engine.released.set()
        await jobs.end(await jobs.submit(model="another-model"))
        assert (await jobs.get(waiting)).status == "QUEUED"


async def test_what_the_operator_does_not_take_any_more_does_not_run(with_jobs: Any):
    async with with_jobs(max_running_jobs=1, allow_cloudpickle=True) as jobs:
        tenants = Tenants(jobs.server)
        jobs.client.headers.update(await tenants.headers("acme"))
        trusted = {**HEADERS, **await tenants.headers("acme", trusted_codecs=True)}
        pickled = trace(codec="cloudpickle")
        refused = await jobs.client.post("/v1/jobs", content=pickled, headers=HEADERS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "codec_not_allowed")
        await jobs.until(await jobs.submit("hang"), "RUNNING")
        waiting = (await jobs.client.post("/v1/jobs", content=pickled, headers=trusted)).json()["id"]
    async with with_jobs() as jobs:
        jobs.client.headers["authorization"] = trusted["authorization"]
        jobs.engine.released.set()
        job = await jobs.end(waiting)
        assert (job.status, job.error.code if job.error else None) == ("ERROR", "codec_not_allowed")
        assert waiting not in jobs.engine.started
    async with with_jobs(allow_code=False) as jobs:
        jobs.client.headers["authorization"] = trusted["authorization"]
        assert (await jobs.get(waiting)).status == "ERROR"


@pytest.mark.parametrize("error", [ConnectionError("the database is away"), asyncio.CancelledError()])
async def test_a_job_whose_use_cannot_be_counted_leaves_its_place(
    with_jobs: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    async def bill(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Rates, "bill", bill)
    async with with_jobs(max_running_jobs=1) as jobs:
        for _ in range(2):
            job = await jobs.end(await jobs.submit())
            assert job.status == "COMPLETED"
        await wait_for_async(lambda: jobs.server.context.jobs.runner.num_running("") == 0)
