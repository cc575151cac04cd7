"""Keys: who is let in, to what, and to whose data; those of the command, and the sandbox they need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from api_schemas.administration import NewKey, Scope, Tier
from app.auth.keys import GIVEN_ID, GivenKeys
from app.storage.tables import Base
from tests.integration.conftest import ErrorCheck, Serve
from tests.integration.scripted_traces import HEADERS, message
from tests.integration.served_routes import ROUTES
from tests.integration.serving import Application
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async

pytestmark = pytest.mark.both_databases

STEER = {"op": "steer", "at": "layers.1.output", "vector": [0.0] * 8}


async def test_without_keys_local_clients_are_admitted_but_make_no_keys(
    serve: Serve, error_of: ErrorCheck
) -> None:
    async with serve() as server:
        assert (await server.complete()).status_code == 200
        for method in ("GET", "POST"):
            answer = await server.client.request(method, "/v1/admin/keys", json={"tenant": "a"})
            assert "keys create" in error_of(answer, 401, "missing_api_key")
        assert not await server.context.keys.are_required()


async def test_no_body_is_read_before_a_key_is_checked(tenants: Tenants, error_of: ErrorCheck) -> None:
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while num_read < 64:
            num_read += 1
            yield b" " * 2**20

    for method, path in [(route.method, route.path) for route in ROUTES if route.scopes is not None]:
        if method in {"POST", "PUT"}:
            answer = await tenants.send(method, path, {"content-type": "application/json"}, content=endless())
            error_of(answer, 401, "missing_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert num_read == 0
    admin = await tenants.headers("operator", Scope.ADMIN)
    headers = {**admin, "content-type": "application/json"}
    answer = await tenants.send("POST", "/v1/admin/keys", headers, content=endless())
    error_of(answer, 413, "body_too_large")


async def test_operations_within_a_request_have_scopes_too(tenants: Tenants, error_of: ErrorCheck) -> None:
    async def complete(headers: dict[str, str], *interventions: object) -> httpx.Response:
        body = {"prompt": "one two", "interventions": list(interventions)}
        return await tenants.send("POST", "/v1/completions", headers, json=body)

    plain = await tenants.headers("acme", Scope.COMPLETIONS)
    steering = await tenants.headers("acme", Scope.COMPLETIONS, Scope.INTERVENTIONS)
    error_of(await complete(plain, STEER), 403, "missing_scope")
    error_of(await complete(plain, {"op": "unknown"}), 403, "missing_scope")  # not even looked at
    assert (await complete(steering, STEER)).status_code == 200
    error_of(await complete(steering, {"op": "trace", "code": "pass"}), 403, "missing_scope")


async def test_the_tier_of_a_key_says_where_its_code_runs(tenants: Tenants) -> None:
    engine = tenants.server.engine.fake_traces
    for tier, runs_in in ((Tier.SANDBOXED, "acme"), (Tier.TRUSTED, None)):
        headers = {**await tenants.headers("acme", Scope.CODE, tier=tier), **HEADERS}
        assert (await tenants.send("POST", "/v1/traces", headers, content=message())).status_code == 200
        job = (await tenants.send("POST", "/v1/jobs", headers, content=message())).json()["id"]

        async def is_completed(path: str = f"/v1/jobs/{job}", headers: dict[str, str] = headers) -> bool:
            return bool((await tenants.send("GET", path, headers)).json()["status"] == "COMPLETED")

        await wait_for_async(is_completed)
        assert engine.sandboxes[-2:] == [runs_in, runs_in]


async def test_an_idempotency_key_is_its_tenants_own(tenants: Tenants) -> None:
    ids = [
        (
            await tenants.send(
                "POST",
                "/v1/jobs",
                {**await tenants.headers(name), **HEADERS, "idempotency-key": "one"},
                content=message(),
            )
        ).json()["id"]
        for name in ("acme", "acme", "rival")
    ]
    assert ids[0] == ids[1] != ids[2]


async def test_keys_are_made_listed_replaced_and_ended_over_http(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    admin = await tenants.headers("operator", Scope.ADMIN)
    new = {"tenant": "acme", "scopes": ["completions"], "name": "app"}
    made = await tenants.send("POST", "/v1/admin/keys", admin, json=new)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    key = made.json()

    async def models(text: str) -> int:
        return (await tenants.send("GET", "/v1/models", {"authorization": f"bearer {text}"})).status_code

    assert await models(key["key"]) == 200

    async def listed_keys() -> list[dict[str, Any]]:
        answer = await tenants.send("GET", "/v1/admin/keys", admin, params={"tenant": "acme"})
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def is_use_noted() -> bool:
        return (await listed_keys())[0]["last_used_at"] is not None

    await wait_for_async(is_use_noted)
    (listed,) = await listed_keys()
    assert {**listed, "last_used_at": None} == {name: value for name, value in key.items() if name != "key"}
    assert listed["last_used_at"] >= listed["created_at"]
    path = f"/v1/admin/keys/{key['id']}"
    kept = (await tenants.send("POST", f"{path}/rotate", admin, json={"grace_s": 60})).json()
    assert (kept["replaces"], kept["name"]) == (key["id"], "app")
    assert [await models(one["key"]) for one in (key, kept)] == [200, 200]
    assert (await tenants.send("DELETE", path, admin)).json()["revoked_at"]
    assert [await models(one["key"]) for one in (key, kept)] == [401, 200]
    error_of(await tenants.send("POST", f"{path}/rotate", admin, json={}), 409, "key_ended")
    error_of(await tenants.send("DELETE", "/v1/admin/keys/none", admin), 404, "key_not_found")
    of_a: list[dict[str, Any]] = [
        {"scopes": ["all"]}, {"hash": "x"}, {"limits": {"concurrency": True}}, {"expires_in_s": True},
    ]  # fmt: skip
    for wrong in ({"tenant": "A b"}, *({"tenant": "a", **one} for one in of_a)):
        error_of(await tenants.send("POST", "/v1/admin/keys", admin, json=wrong), 422, "invalid_shape")


async def test_a_key_ends_by_itself(tenants: Tenants, error_of: ErrorCheck) -> None:
    lasting = await tenants.headers("acme", expires_in_s=60.0)
    headers = await tenants.headers("acme", expires_in_s=1.0)

    async def has_ended() -> bool:
        return (await tenants.send("GET", "/v1/models", headers)).status_code == 401

    assert (await tenants.send("GET", "/v1/models", lasting)).status_code == 200
    await wait_for_async(has_ended)
    error_of(await tenants.send("GET", "/v1/models", headers), 401, "invalid_api_key")


async def test_nothing_that_is_kept_opens_anything(tenants: Tenants, tmp_path: Path) -> None:
    headers = await tenants.headers("acme")
    await tenants.send("GET", "/v1/models", headers)
    secret = headers["authorization"].split("_", 2)[2]
    rows = await tenants.server.context.database.read(
        lambda session: [session.execute(select(table)).all() for table in Base.metadata.sorted_tables]
    )
    files = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    kept = b"".join([repr(rows).encode(), *files])
    assert b"sha256:" in kept
    assert secret.encode() not in kept


TEXTS = ["first secret", "second-secret"]


@pytest.fixture
async def served(tmp_path: Path) -> Application:
    return Application(tmp_path, given_keys=GivenKeys(TEXTS))


@pytest.fixture
async def client(served: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with served.started() as found:
        yield found


def bearer(text: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {text}".encode()}


async def test_each_key_opens_everything_but_administration(
    client: httpx.AsyncClient, error_of: ErrorCheck
) -> None:
    body = {"prompt": "one two", "interventions": [{"op": "capture", "at": "layers.1.output"}]}
    for text in TEXTS:
        answer = await client.post("/v1/completions", json=body, headers=bearer(text))
        assert answer.status_code == 200, answer.text
        assert (await client.get("/metrics", headers=bearer(text))).status_code == 200
        error_of(await client.get("/v1/admin/keys", headers=bearer(text)), 403, "missing_scope")


async def test_nothing_else_does(client: httpx.AsyncClient, error_of: ErrorCheck) -> None:
    error_of(await client.get("/v1/models"), 401, "missing_api_key")
    for wrong in ("first", "first secretx", "FIRST SECRET", GIVEN_ID):
        error_of(await client.get("/v1/models", headers=bearer(wrong)), 401, "invalid_api_key")


async def test_keys_of_the_database_work_beside_them(served: Application, client: httpx.AsyncClient) -> None:
    made = await served.context.keys.create(NewKey(tenant="acme", scopes=(Scope.COMPLETIONS,)))
    assert (await client.get("/v1/models", headers=bearer(made.key))).status_code == 200


USUAL = (Scope.COMPLETIONS, Scope.INTERVENTIONS, Scope.CODE)


@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("scopes", "key", "settings", "expected"),
    [
        (USUAL, {"tier": Tier.SANDBOXED}, {}, True),
        ((Scope.CODE,), {"tier": Tier.SANDBOXED, "expires_in_s": 3600}, {}, True),
        (USUAL, {"tier": Tier.TRUSTED}, {}, False),
        ((Scope.COMPLETIONS, Scope.INTERVENTIONS), {"tier": Tier.SANDBOXED}, {}, False),
        (USUAL, {"tier": Tier.SANDBOXED, "expires_in_s": 1e-6}, {}, False),
        (USUAL, {"tier": Tier.SANDBOXED}, {"sandbox": "off"}, False),
        (USUAL, {"tier": Tier.SANDBOXED}, {"allow_code": False}, False),
    ],
)
async def test_the_sandbox_is_started_for_keys_that_need_it(
    serve: Serve, scopes: tuple[Scope, ...], key: dict[str, Any], settings: dict[str, Any], expected: bool
) -> None:
    async with serve() as server:
        assert not server.engine.has_sandbox
        await Tenants(server).headers("acme", *scopes, **key)
    async with serve(**settings) as server:
        await asyncio.gather(*(one for one in asyncio.all_tasks() if one.get_name() == "engine-started"))
        assert server.engine.has_sandbox == expected
