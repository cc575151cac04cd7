"""The keys of ``--api-key``: what they open, beside those of the database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from api_schemas.keys import NewKey, Scope
from app.auth.given_keys import GIVEN_ID, GivenKeys
from tests.integration.conftest import ErrorCheck
from tests.integration.serving import Served

TEXTS = ["first secret", "second-secret"]


@pytest.fixture
async def served(tmp_path: Path) -> Served:
    return Served(tmp_path, given_keys=GivenKeys(TEXTS))


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
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


async def test_keys_of_the_database_work_beside_them(served: Served, client: httpx.AsyncClient) -> None:
    made = await served.context.keys.create(NewKey(tenant="acme", scopes=(Scope.COMPLETIONS,)))
    assert (await client.get("/v1/models", headers=bearer(made.key))).status_code == 200


async def test_work_of_such_a_key_goes_on_only_while_there_are_some() -> None:
    assert GivenKeys(TEXTS).holder(GIVEN_ID) is not None
    assert GivenKeys(TEXTS).holder("other") is None
    assert GivenKeys().holder(GIVEN_ID) is None
