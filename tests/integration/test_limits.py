"""Limits of keys and tenants: told beforehand, and exact."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from api_schemas.keys import Limits, Scope
from tests.integration.conftest import ErrorCheck
from tests.integration.tenants import Tenants
from tests.integration.trace_messages import HEADERS, message


async def test_requests_beyond_a_keys_rate_get_a_retry_time(tenants: Tenants, error_of: ErrorCheck) -> None:
    limited = await tenants.headers("acme", limits=Limits(requests_per_minute=3))
    other = await tenants.headers("acme")
    left = []
    for _ in range(3):
        answer = await tenants.send("GET", "/v1/models", limited)
        assert answer.status_code == 200
        left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
    assert left == [2, 1, 0]
    assert answer.headers["x-ratelimit-limit-requests"] == "3"
    refused = await tenants.send("GET", "/v1/models", limited)
    assert "3 requests a minute" in error_of(refused, 429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    unlimited = await tenants.send("GET", "/v1/models", other)
    assert unlimited.status_code == 200
    assert "x-ratelimit-limit-requests" not in unlimited.headers


@pytest.mark.both_databases
async def test_a_tenants_limits_are_of_all_its_keys_together(tenants: Tenants, error_of: ErrorCheck) -> None:
    admin = await tenants.headers("operator", Scope.ADMIN)
    keys = [await tenants.headers("acme") for _ in range(2)]
    for key in keys:  # which the server knows from now on
        await tenants.send("GET", "/v1/models", key)
    path = "/v1/admin/tenants/acme/limits"
    changed = await tenants.send("PUT", path, admin, json={"requests_per_minute": 2})
    assert changed.json()["limits"]["requests_per_minute"] == 2
    statuses = [(await tenants.send("GET", "/v1/models", key)).status_code for key in keys * 2]
    assert statuses == [200, 200, 429, 429]
    assert (await tenants.send("GET", "/v1/models", await tenants.headers("rival"))).status_code == 200
    listed = (await tenants.send("GET", "/v1/admin/tenants", admin)).json()["data"]
    assert [(one["name"], one["limits"]["requests_per_minute"]) for one in listed] == [
        ("acme", 2),
        ("operator", None),
        ("rival", None),
    ]
    await tenants.send("PUT", path, admin, json={})
    assert (await tenants.send("GET", "/v1/models", keys[0])).status_code == 200
    error_of(
        await tenants.send("PUT", "/v1/admin/tenants/none/limits", admin, json={}), 404, "tenant_not_found"
    )


async def test_no_more_run_at_once_than_may_and_each_gives_its_place_back(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    limited = await tenants.headers("acme", limits=Limits(concurrency=2))
    other = await tenants.headers("acme")
    tenants.server.engine.behaviour.delay_s = 0.3

    async def complete(headers: dict[str, str], **body: object) -> httpx.Response:
        return await tenants.send("POST", "/v1/completions", headers, json={"prompt": "a", **body})

    answers = await asyncio.gather(*[complete(limited) for _ in range(5)], complete(other))
    assert sorted(one.status_code for one in answers[:5]) == [200, 200, 429, 429, 429]
    assert answers[5].status_code == 200
    refused = next(one for one in answers if one.status_code == 429)
    error_of(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"
    # Streams, requests that fail and traces give their places back too.
    tenants.server.engine.behaviour.delay_s = 0
    for _ in range(3):
        assert (await complete(limited, stream=True, max_tokens=2)).status_code == 200
        assert (await complete(limited, model="none")).status_code == 404
        traced = await tenants.send("POST", "/v1/traces", {**limited, **HEADERS}, content=message())
        assert traced.status_code == 200
    assert tenants.server.context.rates.num_running("acme") == 0


async def test_what_one_group_refuses_is_counted_by_none(tenants: Tenants) -> None:
    admin = await tenants.headers("operator", Scope.ADMIN)
    headers = await tenants.headers("acme", limits=Limits(requests_per_minute=10))
    path = "/v1/admin/tenants/acme/limits"
    await tenants.send("PUT", path, admin, json={"requests_per_minute": 1})
    answers = [await tenants.send("GET", "/v1/models", headers) for _ in range(4)]
    assert [one.status_code for one in answers] == [200, 429, 429, 429]
    # Told is what is nearer.
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "0"
    await tenants.send("PUT", path, admin, json={})
    again = await tenants.send("GET", "/v1/models", headers)
    # Of ten, two were taken; on a slow machine one has come back since.
    assert again.headers["x-ratelimit-remaining-requests"] in {"8", "9"}


async def test_no_more_come_in_together_than_may(tenants: Tenants) -> None:
    headers = await tenants.headers("acme", limits=Limits(requests_per_minute=5))
    answers = await asyncio.gather(*[tenants.send("GET", "/v1/models", headers) for _ in range(20)])
    assert sum(one.status_code == 200 for one in answers) == 5


@pytest.mark.both_databases
async def test_a_key_keeps_its_limits_when_it_is_replaced(tenants: Tenants) -> None:
    admin = await tenants.headers("operator", Scope.ADMIN)
    new = {"tenant": "acme", "limits": {"requests_per_minute": 7, "concurrency": 2}}
    made = (await tenants.send("POST", "/v1/admin/keys", admin, json=new)).json()
    replaced = (await tenants.send("POST", f"/v1/admin/keys/{made['id']}/rotate", admin, json={})).json()
    assert made["limits"] == replaced["limits"]
    assert {name: value for name, value in made["limits"].items() if value is not None} == new["limits"]
