"""The audit log: it records who ran which operation, and no contents."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.administration import Limits, Scope
from api_schemas.jobs import JobEvent, JobStatus, JobSummary
from app import audit as audit_log
from app.cli import main
from app.limits.limit import Limit
from app.storage.audit import AuditFilter, AuditStore
from app.storage.database import Database
from app.storage.jobs import store
from app.storage.jobs.store import JobStore, NewJob
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.scripted_traces import HEADERS, message
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async

SECRET = "xyzzy-plugh"
CAPTURE = {"op": "capture", "at": "layers.1.output", "name": "kept"}
STEER = {"op": "steer", "at": "layers.1.output", "vector": [0.0] * 8}


async def entries(server: Server, **wanted: Any) -> list[dict[str, Any]]:
    """Return what is written down, the newest first."""
    await server.context.log.flush()
    found, _ = await AuditStore(server.context.database).page(AuditFilter(**wanted), limit=1000)
    return [entry.model_dump() for entry in found]


async def newest(tenants: Tenants) -> dict[str, Any]:
    return (await entries(tenants.server))[0]


async def _any(found: Awaitable[list[Any]]) -> bool:
    return bool(await found)


async def complete(tenants: Tenants, headers: dict[str, str], **body: object) -> httpx.Response:
    return await tenants.send("POST", "/v1/completions", headers, json={"prompt": SECRET, **body})


async def test_a_completion_is_written_down_without_its_words(tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    before = time.time()
    answer = await complete(tenants, headers, model="tiny", interventions=[CAPTURE, STEER], max_tokens=3)
    assert answer.status_code in {200, 404}
    answer = await complete(tenants, headers, interventions=[CAPTURE, STEER], max_tokens=3)
    entry = await newest(tenants)
    assert entry["tenant"] == "acme"
    assert headers["authorization"].split("_")[1] == entry["key_id"]
    assert answer.headers["x-request-id"] == entry["request_id"]
    assert (entry["method"], entry["route"], entry["status"]) == ("POST", "/v1/completions", 200)
    assert entry["operations"] == ["capture", "steer"]
    assert entry["tokens"] == 4
    assert entry["captured_bytes"] > 0
    assert entry["response_bytes"] == len(answer.content)
    assert entry["request_bytes"] > 100
    assert before <= entry["time"] <= time.time()
    assert 0 < entry["duration_s"] < 60
    assert entry["error"] == ""
    assert SECRET not in json.dumps(await entries(tenants.server))


async def test_code_is_written_down_as_its_hash(tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    code = f"hidden = model.layers[1].output.save()  # {SECRET}"
    await complete(tenants, headers, interventions=[{"op": "trace", "code": code}])
    entry = await newest(tenants)
    assert entry["code_sha256"] == hashlib.sha256(code.encode()).hexdigest()
    assert entry["code_bytes"] == len(code)
    traced = await tenants.send(
        "POST", "/v1/traces", {**headers, **HEADERS}, content=message(blocks=SECRET.encode())
    )
    entry = await newest(tenants)
    assert (entry["route"], entry["operations"]) == ("/v1/traces", ["trace"])
    assert entry["subject"] == traced.headers["nnsight-job-id"]
    assert entry["code_sha256"] == hashlib.sha256(SECRET.encode()).hexdigest()
    assert SECRET not in json.dumps(await entries(tenants.server))


async def test_a_job_is_written_down_when_it_comes_and_when_it_was_run(tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    submitted = await tenants.send("POST", "/v1/jobs", {**headers, **HEADERS}, content=message())
    job_id = submitted.json()["id"]

    async def runs() -> list[dict[str, Any]]:
        return [one for one in await entries(tenants.server) if one["method"] == "RUN"]

    await wait_for_async(lambda: _any(runs()))
    (run,) = await runs()
    assert (run["tenant"], run["subject"]) == ("acme", job_id)
    assert run["details"] == {"status": "COMPLETED"}
    assert headers["authorization"].split("_")[1] == run["key_id"]
    assert run["code_sha256"] == hashlib.sha256(b"blocks").hexdigest()
    (came,) = [one for one in await entries(tenants.server) if one["route"] == "/v1/jobs"]
    assert (came["subject"], came["status"]) == (job_id, 202)


@pytest.mark.both_databases
async def test_what_runs_long_is_written_down_before_it_ends(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "_GATHER_S", 0.05)
    headers = await tenants.headers("acme")
    tenants.server.engine.behaviour.delay_s = 0.3
    code = "hidden = model.layers[1].output.save()"
    running = asyncio.create_task(
        complete(tenants, headers, interventions=[{"op": "trace", "code": code}], max_tokens=3)
    )
    await wait_for_async(lambda: _any(entries(tenants.server)))
    # As it would be found if the server died now.
    (begun,) = await entries(tenants.server)
    assert (begun["status"], begun["error"], begun["tenant"]) == (None, "under_way", "acme")
    assert begun["code_sha256"] == hashlib.sha256(code.encode()).hexdigest()
    assert not running.done()
    monkeypatch.setattr(audit_log, "_MAX_PENDING", 0)  # a row that is there is finished all the same
    answer = await running
    (ended,) = await entries(tenants.server)
    assert (ended["number"], ended["request_id"]) == (begun["number"], answer.headers["x-request-id"])
    assert (ended["status"], ended["error"]) == (answer.status_code, "")
    assert ended["duration_s"] > 0.2


@pytest.mark.both_databases
async def test_a_job_whose_server_died_is_written_down_by_the_next(
    serve: Serve, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path / "data", database_url)
    await database.start()
    summary = JobSummary(
        model="fake-model", dialect="vllm", kind="trace", num_blocks=1, python="3", client=""
    )
    values: dict[str, Any] = {"digest": "0", "request_bytes": 1, "idempotency_key": None, "reruns": False}
    dead = JobStore(database, "dead", waiting=Limit("jobs", 10), ttl_s=60)
    for name in ("waits", "runs"):
        new = NewJob(id=name, owner="acme", model="fake-model", summary=summary, key_id="k", **values)
        await dead.accept(new)
    job = await dead.claim("fake-model", {})
    assert job is not None
    await dead.append_events(job, [JobEvent(status=JobStatus.RUNNING, time=1.0)])
    await database.close()
    monkeypatch.setattr(store, "LEASE_S", -1.0)
    async with serve(database_url=database_url) as server:
        (entry,) = [one for one in await entries(server) if one["error"] == "interrupted"]
        assert (entry["method"], entry["tenant"], entry["subject"]) == ("RUN", "acme", job.id)


async def test_keys_are_accounted_for_over_http_and_by_command(
    tenants: Tenants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = await tenants.headers("operator", Scope.ADMIN)
    new = {"tenant": "acme", "scopes": ["completions"]}
    made = (await tenants.send("POST", "/v1/admin/keys", admin, json=new)).json()
    entry = await newest(tenants)
    assert (entry["tenant"], entry["subject"]) == ("operator", made["id"])
    assert (entry["details"]["tenant"], entry["details"]["scopes"]) == ("acme", ["completions"])
    await tenants.send("PUT", "/v1/admin/tenants/acme/limits", admin, json={"concurrency": 2})
    assert (await newest(tenants))["details"]["limits"] == {"concurrency": 2}
    await tenants.send("DELETE", f"/v1/admin/keys/{made['id']}", admin)
    entry = await newest(tenants)
    assert (entry["method"], entry["subject"]) == ("DELETE", made["id"])
    monkeypatch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(tmp_path / "data"))
    assert await asyncio.to_thread(main, ["keys", "create", "--tenant", "other"]) == 0
    entry = await newest(tenants)
    assert (entry["method"], entry["route"], entry["tenant"]) == ("CLI", "keys create", "")
    assert entry["details"]["tenant"] == "other"
    assert entry["details"]["id"] == entry["subject"]
    whole = json.dumps(await entries(tenants.server))
    assert made["key"] not in whole
    assert "sha256:" not in whole


async def test_refusals_are_written_down_but_not_those_of_a_rate(tenants: Tenants) -> None:
    few = await tenants.headers("acme", Scope.COMPLETIONS, limits=Limits(requests_per_minute=2))
    assert (await complete(tenants, few, interventions=[CAPTURE])).status_code == 403
    entry = await newest(tenants)
    assert (entry["status"], entry["error"]) == (403, "missing_scope")
    assert (await complete(tenants, few, model="none")).status_code == 404
    entry = await newest(tenants)
    assert entry["status"] == 404
    assert entry["error"]
    num = len(await entries(tenants.server))
    assert (await complete(tenants, few)).status_code == 429
    for headers in ({}, {"authorization": "Bearer nns_0123456789abcdef_x"}):
        assert (await complete(tenants, headers)).status_code == 401
    assert (await tenants.send("GET", "/v1/models", await tenants.headers("acme"))).status_code == 200
    assert len(await entries(tenants.server)) == num


async def test_an_error_within_a_stream_is_audited(tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    tenants.server.engine.behaviour.stream_error = RuntimeError("broken")
    assert (await complete(tenants, headers, stream=True)).status_code == 200
    entry = await newest(tenants)
    assert (entry["status"], entry["error"]) == (200, "internal_error")


async def test_a_disconnected_client_is_audited(tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    tenants.server.engine.behaviour.delay_s = 0.05
    leaving = asyncio.create_task(complete(tenants, headers, stream=True, max_tokens=1000))
    await wait_for_async(lambda: tenants.server.engine.num_running)
    await asyncio.sleep(0.2)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    entry = await newest(tenants)
    assert (entry["status"], entry["error"]) == (200, "client_left")
    assert 1 < entry["tokens"] < 1000
    assert 0 < entry["response_bytes"] < 10_000


async def test_hostile_text_is_kept_short_and_storable(tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    body = json.dumps({"prompt": "a", "model": "\0\ud800" + "x" * 5000})
    await tenants.send("POST", "/v1/completions", headers, content=body)
    await tenants.send("DELETE", "/v1/jobs/%00" + "y" * 3000, headers)
    for entry in (await entries(tenants.server))[:2]:
        assert "\0" not in entry["model"] + entry["subject"]
        assert len(entry["model"]) <= 200
        assert len(entry["subject"]) <= 200


async def test_administrators_read_it_in_pages(tenants: Tenants, error_of: ErrorCheck) -> None:
    admin = await tenants.headers("operator", Scope.ADMIN)
    acme, rival = await tenants.headers("acme"), await tenants.headers("rival")
    for headers in (acme, rival, acme, acme):
        await complete(tenants, headers)
    await tenants.server.context.log.flush()

    async def page(**params: Any) -> dict[str, Any]:
        answer = await tenants.send("GET", "/v1/admin/audit", admin, params=params)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    first = await page(tenant="acme", limit=2)
    assert [one["tenant"] for one in first["data"]] == ["acme", "acme"]
    assert first["has_more"]
    second = await page(tenant="acme", limit=2, after=first["last_number"])
    assert len(second["data"]) == 1
    assert not second["has_more"]
    numbers = [one["number"] for one in (await page())["data"]]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == 4
    key_id = rival["authorization"].split("_")[1]
    (only,) = (await page(key_id=key_id))["data"]
    assert only["tenant"] == "rival"
    assert (await page(since=time.time() + 10))["data"] == []
    assert len((await page(until=time.time() + 10))["data"]) == 4
    error_of(
        await tenants.send("GET", "/v1/admin/audit", acme | {}, params={"limit": 0}), 422, "invalid_shape"
    )
    only_completes = await tenants.headers("acme", Scope.COMPLETIONS)
    error_of(await tenants.send("GET", "/v1/admin/audit", only_completes), 403, "missing_scope")


async def test_it_is_there_after_a_restart_until_its_time_is_over(serve: Serve) -> None:
    async with serve() as server:
        tenants = Tenants(server)
        await complete(tenants, await tenants.headers("acme"))
    async with serve() as server:
        assert [entry["tenant"] for entry in await entries(server)] == ["acme"]
    async with serve(audit_days=1e-8) as server:

        async def is_empty() -> bool:
            return not await entries(server)

        await wait_for_async(is_empty)


async def test_nothing_is_written_without_keys_nor_where_it_is_switched_off(serve: Serve) -> None:
    async with serve() as server:
        await server.complete()
        assert await entries(server) == []
    async with serve(audit_days=0) as server:
        tenants = Tenants(server)
        assert (await complete(tenants, await tenants.headers("acme"))).status_code == 200
        assert await entries(server) == []


async def test_what_does_not_fit_is_counted(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "_MAX_PENDING", 0)
    headers = await tenants.headers("acme")
    for _ in range(3):
        assert (await complete(tenants, headers)).status_code == 200
    (entry,) = await entries(tenants.server)
    assert (entry["route"], entry["details"]) == ("lost", {"records": 3})
