"""Keys that the command is given, and the sandbox that it starts ahead for keys that need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.keys import NewKey, Scope, Tier
from app.auth.given_keys import GIVEN_ID, GivenKeys
from tests.integration.conftest import ErrorCheck, Serve
from tests.integration.serving import Application
from tests.integration.tenants import Tenants

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
