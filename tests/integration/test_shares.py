"""Shares of one tenant: queued jobs, stored bytes, and the visibility of other tenants' usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from api_schemas.administration import Limits, Scope
from app.limits.limit import Holder
from app.services.jobs.service import JobService
from tests.integration.conftest import ErrorCheck
from tests.integration.scripted_traces import HEADERS, Jobs, sent_events, trace
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async

USUAL = (Scope.COMPLETIONS, Scope.INTERVENTIONS, Scope.CODE)


class Team(Jobs):
    """The jobs of one key on a server."""

    def __init__(self, jobs: Jobs, headers: dict[str, str]) -> None:
        super().__init__(jobs.server, jobs.engine)
        self.tenants = Tenants(jobs.server)
        self.headers = headers

    async def post(self, script: str = "ok", key: str | None = None, **options: Any) -> Any:
        assert key is None
        headers = {**HEADERS, **self.headers}
        return await self.client.post("/v1/jobs", content=trace(script, **options), headers=headers)

    async def get(self, job_id: str) -> Any:
        # All keys of the test see their own jobs.
        response = await self.client.get(f"/v1/jobs/{job_id}", headers=self.headers)
        assert response.status_code == 200, response.text
        return type("Told", (), response.json())

    async def complete(self, **body: Any) -> Any:
        return await self.client.post(
            "/v1/completions", json={"prompt": "one two", **body}, headers=self.headers
        )

    async def status(self) -> tuple[int, int]:
        told = (await self.client.get("/v1/status", headers=self.headers)).json()
        return told["in_flight"], told["queued"]


Teams = Callable[..., AbstractAsyncContextManager[Callable[..., Any]]]


@pytest.fixture
def teams(with_jobs: Any) -> Teams:
    """Serve, and give what makes a key and its client."""

    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[Callable[..., Any]]:
        async with with_jobs(**{"max_running_jobs": 1, **settings}) as jobs:
            tenants = Tenants(jobs.server)

            async def team(tenant: str, *scopes: Scope, **limits: float) -> Team:
                given = Limits.model_validate(limits)
                return Team(jobs, await tenants.headers(tenant, *(scopes or USUAL), limits=given))

            yield team

    return serving


def counted(jobs: JobService, holder: str) -> int:
    """Return the bytes that a server counts for a tenant or a key."""
    return jobs._files.space.used(holder)  # noqa: SLF001 - the server only shows the sum of all


async def stored(jobs: JobService) -> Mapping[Holder, int]:
    """Return the bytes that the database knows of."""
    return await jobs._store.used_bytes()  # noqa: SLF001 - the server only shows what it counts


async def test_no_tenant_has_all_the_places_of_jobs_that_run(teams: Teams) -> None:
    async with teams(max_running_jobs=4) as team:
        ours, theirs = await team("acme"), await team("rival")
        jobs = [await ours.submit("hang") for _ in range(4)]
        for job in jobs[:2]:
            await ours.until(job, "RUNNING")
        await theirs.until(await theirs.submit("hang"), "RUNNING")
        assert [(await ours.get(job)).status for job in jobs[2:]] == ["QUEUED"] * 2
        ours.engine.released.set()
        for job in jobs:
            await ours.end(job)
        assert ours.engine.most_running == 3


@pytest.mark.both_databases
async def test_no_tenant_fills_the_queue_and_each_sees_its_own(teams: Teams, error_of: ErrorCheck) -> None:
    async with teams(max_queued_jobs=5) as team:
        ours, theirs, admin = [await team(*who) for who in (("acme",), ("rival",), ("op", Scope.ADMIN))]
        running = await ours.submit("hang")
        await ours.until(running, "RUNNING")
        for _ in range(3):
            await ours.submit()
        told = error_of(await ours.post(), 429, "queue_full")
        assert "The tenant 'acme' may have 3 queued jobs" in told
        await theirs.submit()
        assert await ours.status() == (1, 3)
        assert await theirs.status() == (0, 1)
        assert (await admin.status())[1] == 4
        await theirs.submit()
        assert "This server may have 5 queued jobs" in error_of(await theirs.post(), 429, "queue_full")
        ours.engine.released.set()


async def test_without_keys_there_are_no_shares(with_jobs: Any) -> None:
    async with with_jobs(max_running_jobs=1, max_queued_jobs=4, job_store_bytes=60_000) as jobs:
        await jobs.until(await jobs.submit("hang"), "RUNNING")
        for _ in range(4):
            await jobs.submit()
        jobs.engine.released.set()


async def test_no_tenant_fills_the_store_of_jobs(teams: Teams, error_of: ErrorCheck) -> None:
    async with teams(job_store_bytes=100_000) as team:
        ours, theirs = await team("acme"), await team("rival")
        ours.engine.released.set()
        job = await ours.submit(payload=bytes(40_000))
        told = error_of(await ours.post(payload=bytes(40_000)), 503, "job_store_full")
        assert "tenant 'acme' may have 50000 bytes" in told
        await theirs.submit(payload=bytes(40_000))
        await ours.end(job)
        await ours.client.delete(f"/v1/jobs/{job}", headers=ours.headers)
        await ours.submit(payload=bytes(40_000))


@pytest.mark.both_databases
async def test_what_jobs_print_counts_and_so_does_their_number(teams: Teams, error_of: ErrorCheck) -> None:
    async with teams(job_store_bytes=400_000) as team:
        ours, theirs = await team("acme"), await team("rival")
        jobs = ours.server.context.jobs
        printing = await ours.submit("prints:50")
        assert (await ours.end(printing)).status == "COMPLETED"
        answer = await ours.client.get(f"/v1/jobs/{printing}/events", headers=ours.headers)
        lines = [event["message"] for event in sent_events(answer.text) if event["status"] == "LOG"]
        # As much as fits is kept, and then what became of the rest is told.
        assert 10 < len(lines) < 25
        assert "not kept" in lines[-1]
        assert "tenant 'acme' may have 200000 bytes" in lines[-1]
        # The end is written down all the same, and what is counted is what is there.
        known = sum((await stored(jobs)).values())
        assert counted(jobs, "acme") == known
        assert 180_000 < known < 220_000
        error_of(await ours.post(), 503, "job_store_full")
        other = await theirs.submit("prints:5")
        await theirs.end(other)
        await ours.client.delete(f"/v1/jobs/{printing}", headers=ours.headers)
        assert counted(jobs, "acme") == 0
        # Jobs that are nothing but many count as well.
        for _ in range(20):
            await ours.submit()
        error_of(await ours.post(payload=bytes(40_000)), 503, "job_store_full")


@pytest.mark.both_databases
async def test_stored_bytes_are_limited_by_key_and_tenant(teams: Teams, error_of: ErrorCheck) -> None:
    async with teams() as team:
        ours, colleague = await team("acme", stored_bytes=50_000), await team("acme")
        ours.engine.released.set()
        job = await ours.submit(payload=bytes(40_000))
        told = error_of(await ours.post(payload=bytes(40_000)), 403, "stored_bytes_full")
        assert "DELETE /v1/jobs" in told
        await ours.end(job)
        other = await colleague.submit(payload=bytes(40_000))
        await colleague.end(other)
        admin = await team("op", Scope.ADMIN)
        limits = {"stored_bytes": 110_000}
        await ours.client.put("/v1/admin/tenants/acme/limits", json=limits, headers=admin.headers)
        assert (await colleague.post(payload=bytes(40_000))).status_code == 403
        await colleague.client.delete(f"/v1/jobs/{job}", headers=colleague.headers)  # all are the tenant's
        assert (await colleague.post(payload=bytes(40_000))).status_code == 202
        # A result that has no room fails its job, and says so.
        big = await ours.submit("big:30000", payload=bytes(100))
        ended = await ours.end(big)
        assert (ended.status, ended.error["code"]) == ("ERROR", "stored_bytes_full")
        # What was counted is what is there.
        await asyncio.sleep(0)
        jobs = ours.server.context.jobs
        counts = {name: counted(jobs, name) for name in ("acme", "op")}
        known = await stored(jobs)
        assert counts == {"acme": sum(known.values()), "op": 0}


async def test_a_job_s_result_counts_for_as_long_as_it_is_read(teams: Teams) -> None:
    async with teams() as team:
        ours = await team("acme")
        jobs = ours.server.context.jobs
        space = jobs._files.space  # noqa: SLF001 - as the server itself sets it, now and then
        job = await ours.submit("big:30000")
        await ours.end(job)
        readers = [(await jobs.result(job, "acme"))[1] for _ in range(2)]
        await ours.client.delete(f"/v1/jobs/{job}", headers=ours.headers)
        assert 30_000 < counted(jobs, "acme") < 31_000
        space.set_stored(await stored(jobs))
        assert 30_000 < counted(jobs, "acme") < 31_000
        assert b"".join([chunk async for chunk in readers[0].chunks()])[-30_000:] == bytes(30_000)
        assert counted(jobs, "acme")
        await readers[1].close()
        assert counted(jobs, "acme") == 0


async def test_results_make_room_for_results_of_the_same_holder_alone(
    teams: Teams, error_of: ErrorCheck
) -> None:
    capture = {"op": "capture", "at": "layers.*.output", "name": "kept"}
    async with teams(inline_tensor_bytes=0) as team:
        theirs = await team("rival")

        async def url(one: Team) -> str:
            answer = await one.complete(interventions=[capture], max_tokens=1)
            assert answer.status_code == 200, answer.text
            points = answer.json()["choices"][0]["interventions"]["results"]["kept"]["points"]
            return str(next(iter(points.values()))["url"])

        async def statuses(one: Team, urls: list[str]) -> list[int]:
            return [(await one.client.get(url, headers=one.headers)).status_code for url in urls]

        kept = await url(theirs)
        num_bytes = len((await theirs.client.get(kept, headers=theirs.headers)).content)
        ours = await team("acme", stored_bytes=2 * num_bytes - 1)
        urls = [await url(ours) for _ in range(4)]
        assert await statuses(ours, urls) == [404, 404, 404, 200]
        assert await statuses(theirs, [kept]) == [200]
        small = await team("acme", stored_bytes=10)
        answer = await small.complete(interventions=[capture], max_tokens=1)
        error_of(answer, 403, "stored_bytes_full")


@pytest.mark.both_databases
async def test_waiting_jobs_of_a_key_that_ended_do_not_run(teams: Teams) -> None:
    async with teams() as team:
        ours, other, admin = [await team(*who) for who in (("acme",), ("acme",), ("op", Scope.ADMIN))]
        rotated = await team("rival")
        running = await ours.submit("hang")
        await ours.until(running, "RUNNING")
        waiting, theirs, replaced = await ours.submit(), await other.submit(), await rotated.submit()
        for one, how in ((ours, "DELETE"), (rotated, "rotate")):
            key_id = one.headers["authorization"].split("_")[1]
            path = f"/v1/admin/keys/{key_id}" + ("/rotate" if how == "rotate" else "")
            method = "POST" if how == "rotate" else "DELETE"
            answer = await one.client.request(method, path, headers=admin.headers, **_body(how))
            assert answer.status_code in {200, 201}
            if how == "rotate":
                rotated.headers = {"authorization": f"Bearer {answer.json()['key']}"}
        ours.engine.released.set()
        ours.headers = other.headers  # who sees the same jobs
        assert (await ours.end(running)).status == "COMPLETED"  # it had begun
        assert (await ours.end(theirs)).status == "COMPLETED"
        assert (await rotated.end(replaced)).status == "COMPLETED"
        ended = await ours.end(waiting)
        assert (ended.status, ended.error["code"]) == ("ERROR", "key_ended")
        assert waiting not in ours.engine.started
        again = await ours.client.post(f"/v1/jobs/{waiting}/rerun", headers=ours.headers)
        assert again.status_code == 202
        assert (await ours.end(waiting)).status == "COMPLETED"


def _body(how: str) -> dict[str, Any]:
    return {"json": {}} if how == "rotate" else {}


@pytest.mark.both_databases
async def test_jobs_of_a_key_without_quota_wait_and_delay_no_others(
    teams: Teams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.services.jobs.runner._MAX_HOLD_S", 0.2)
    async with teams() as team:
        ours, theirs, admin = [await team(*who) for who in (("acme",), ("rival",), ("op", Scope.ADMIN))]
        await ours.until(await ours.submit("hang"), "RUNNING")
        waiting = [await ours.submit() for _ in range(2)]
        path = "/v1/admin/tenants/acme/limits"
        counts = ours.server.context.rates.counts
        await counts.add("acme/captured_bytes_per_minute", 1000, 1000)
        limits = {"captured_bytes_per_minute": 10}
        await ours.client.put(path, json=limits, headers=admin.headers)
        later = await theirs.submit()
        ours.engine.released.set()
        assert (await theirs.end(later)).status == "COMPLETED"

        async def wait_on() -> bool:
            # One may be claimed just now, and is put back.
            told = [await ours.get(job) for job in waiting]
            assert {one.status for one in told} == {"QUEUED"}
            return [one.attempt for one in told] == [0, 0]

        await wait_for_async(wait_on)
        await ours.client.put(path, json={}, headers=admin.headers)
        for job in waiting:
            assert (await ours.end(job)).status == "COMPLETED"
