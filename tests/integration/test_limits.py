"""Limits of keys and tenants: rates, requests at once, and quotas per minute of what requests use."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from api_schemas.administration import Limits, Scope
from nnsight_engine.remote_backend.messages import SentInvoke
from tests.integration.conftest import ErrorCheck
from tests.integration.scripted_traces import HEADERS, message
from tests.integration.scripted_traces import trace as scripted
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async


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


CAPTURE = {"op": "capture", "at": "layers.*.output", "name": "kept"}
STEER = {"op": "steer", "at": "layers.1.output", "vector": [0.0] * 8}


class Client:
    """Somebody with a key."""

    def __init__(self, tenants: Tenants, headers: dict[str, str]) -> None:
        self.tenants = tenants
        self.headers = headers

    async def complete(self, prompt: object = "one two three", **body: Any) -> httpx.Response:
        answer = await self.tenants.send(
            "POST", "/v1/completions", self.headers, json={"prompt": prompt, **body}
        )
        await self.counted()
        return answer

    async def trace(self, path: str = "/v1/traces") -> httpx.Response:
        answer = await self.tenants.send("POST", path, {**self.headers, **HEADERS}, content=message())
        await self.counted()
        return answer

    async def counted(self) -> None:
        """Wait until what has ended is counted, as nobody else does."""
        await self.tenants.server.context.rates.close()  # which waits, and closes nothing


async def client(tenants: Tenants, **limits: float) -> Client:
    return Client(tenants, await tenants.headers("acme", limits=Limits.model_validate(limits)))


async def test_tokens_are_counted_as_used_and_reported(tenants: Tenants, error_of: ErrorCheck) -> None:
    ours = await client(tenants, tokens_per_minute=1000)
    first = await ours.complete(max_tokens=300)
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert 690 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 700  # what it asked for is set aside
    assert 1 <= int(first.headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 120
    again = await ours.complete(max_tokens=600)
    assert 90 <= int(again.headers["x-ratelimit-remaining-tokens"]) <= 100
    refused = await ours.complete(max_tokens=600)
    assert "1000 tokens a minute" in error_of(refused, 429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert refused.headers.get_list("x-ratelimit-limit-tokens") == ["1000"]
    # Small ones still have room, and whatever uses no tokens is not concerned.
    assert (await ours.complete(max_tokens=5)).status_code == 200
    assert (await tenants.send("GET", "/v1/models", ours.headers)).status_code == 200


async def test_what_was_set_aside_and_not_used_is_given_back(tenants: Tenants) -> None:
    ours = await client(tenants, tokens_per_minute=1000)
    for _ in range(5):
        refused = await ours.complete(max_tokens=900, model="none")
        assert refused.status_code == 404
    assert (await ours.complete(max_tokens=900)).status_code == 200


async def test_a_request_larger_than_a_minutes_quota_is_refused(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    ours = await client(tenants, tokens_per_minute=100)
    calls = tenants.server.engine.num_calls
    for body in (
        {"max_tokens": 101},
        {"max_tokens": 51, "n": 2},
        {"prompt": [1] * 101},
        {"prompt": [[1] * 51] * 2},
        {"prompt": ["a", "b"], "max_tokens": 51},
        {"max_tokens": 10**300},
    ):
        told = error_of(await ours.complete(**body), 400, "request_beyond_limit")
        assert "100 tokens a minute" in told
    assert tenants.server.engine.num_calls == calls
    # Of a text nobody knows beforehand: the minute must be empty, and is then used up, and more.
    assert (await ours.complete("word " * 400, max_tokens=1)).status_code == 200
    refused = await ours.complete(max_tokens=1)
    error_of(refused, 429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 40  # all that was used counts


async def test_a_minute_that_is_used_up_refuses_before_the_body_is_read(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    ours = await client(tenants, tokens_per_minute=10)
    assert (await ours.complete(max_tokens=10, prompt=" ".join("abcdefghijkl"))).status_code == 200
    num_read = 0

    async def endless() -> Any:
        nonlocal num_read
        num_read += 1
        yield b"{"

    headers = {**ours.headers, "content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = await tenants.send("POST", path, headers, content=endless())
        error_of(answer, 429, "rate_limit_exceeded")
    assert num_read == 0
    error_of(await ours.trace(), 429, "rate_limit_exceeded")
    error_of(await ours.trace("/v1/jobs"), 429, "rate_limit_exceeded")


async def test_many_at_once_do_not_run_past_the_limit(tenants: Tenants) -> None:
    ours = await client(tenants, tokens_per_minute=1000)
    answers = await asyncio.gather(*[ours.complete([1], max_tokens=300) for _ in range(10)])
    assert sorted(one.status_code for one in answers) == [200] * 3 + [429] * 7


@pytest.mark.parametrize("left_early", [False, True])
async def test_streams_count_what_they_used(
    tenants: Tenants, error_of: ErrorCheck, left_early: bool
) -> None:  # fmt: skip
    ours = await client(tenants, tokens_per_minute=100)
    tenants.server.engine.behaviour.delay_s = 0.001
    body = {"prompt": "a", "max_tokens": 90, "stream": True}
    if left_early:
        tenants.server.engine.behaviour.stream_error = RuntimeError("as if the client had gone")
        tenants.server.engine.behaviour.num_events_before_error = 20
    await ours.complete(**body)
    refused = await ours.complete(max_tokens=99 if left_early else 20)
    error_of(refused, 429, "rate_limit_exceeded")
    left = int(refused.headers["x-ratelimit-remaining-tokens"])
    assert (75 <= left <= 85) if left_early else (8 <= left <= 15)


async def test_captured_bytes_end_interventions_and_nothing_else(
    tenants: Tenants, error_of: ErrorCheck
) -> None:
    ours = await client(tenants, captured_bytes_per_minute=100)
    assert (await ours.complete(interventions=[STEER])).status_code == 200
    assert (await ours.complete(interventions=[STEER])).status_code == 200
    assert (await ours.complete(interventions=[CAPTURE])).status_code == 200
    refused = await ours.complete(interventions=[{"op": "unknown"}])  # which is not looked at
    assert "captured bytes a minute" in error_of(refused, 429, "rate_limit_exceeded")
    error_of(await ours.trace(), 429, "rate_limit_exceeded")
    assert (await ours.complete()).status_code == 200
    # What a trace saves is counted too, that of others is not.
    theirs = await client(tenants, captured_bytes_per_minute=10)
    assert (await theirs.trace()).status_code == 200
    error_of(await theirs.trace(), 429, "rate_limit_exceeded")


async def test_time_that_interventions_take_is_limited(tenants: Tenants, error_of: ErrorCheck) -> None:
    ours = await client(tenants, intervention_seconds_per_minute=0.5)
    tenants.server.engine.behaviour.intervention_s = 0.3
    for _ in range(2):
        assert (await ours.complete(interventions=[STEER])).status_code == 200
    refused = await ours.complete(interventions=[STEER])
    assert "0.5 seconds of interventions a minute" in error_of(refused, 429, "rate_limit_exceeded")
    assert (await ours.complete()).status_code == 200
    tenants.server.engine.fake_traces.behaviour.intervention_s = 2.0
    theirs = await client(tenants, intervention_seconds_per_minute=1.5)
    assert (await theirs.trace()).status_code == 200
    error_of(await theirs.trace(), 429, "rate_limit_exceeded")


async def test_a_tenant_has_quotas_too(tenants: Tenants, error_of: ErrorCheck) -> None:
    admin = await tenants.headers("operator", Scope.ADMIN)
    keys = [await client(tenants), await client(tenants)]
    path = "/v1/admin/tenants/acme/limits"
    changed = await tenants.send("PUT", path, admin, json={"tokens_per_minute": 50})
    assert changed.json()["limits"]["tokens_per_minute"] == 50
    assert (await keys[0].complete(max_tokens=40)).status_code == 200
    error_of(await keys[1].complete(max_tokens=40), 429, "rate_limit_exceeded")
    for bad in ({"tokens_per_minute": 0}, {"intervention_seconds_per_minute": "nan"}, {"stored_bytes": -1}):
        assert (await tenants.send("PUT", path, admin, json=bad)).status_code in {400, 422}


async def test_jobs_use_what_their_key_has(tenants: Tenants, error_of: ErrorCheck) -> None:
    ours = await client(tenants, tokens_per_minute=100)
    tenants.server.engine.fake_traces.behaviour.num_tokens = 150
    first = await ours.trace("/v1/jobs")
    assert first.status_code == 202
    jobs, job = tenants.server.context.jobs, first.json()["id"]

    async def is_counted() -> bool:
        return (await jobs.get(job, "acme")).status.is_final and not jobs.runner.num_running("acme")

    await wait_for_async(is_counted)
    error_of(await ours.trace("/v1/jobs"), 429, "rate_limit_exceeded")
    error_of(await ours.complete(), 429, "rate_limit_exceeded")


async def test_trainings_use_what_interventions_use(tenants: Tenants, error_of: ErrorCheck) -> None:
    ours = await client(tenants, captured_bytes_per_minute=100)
    tenants.server.engine.behaviour.pulls = {"good": [1.0] * 2, "bad": [-1.0] * 2}
    sides = {side: [f"{side} {word}" for word in "abcd"] for side in ("good", "bad")}
    body = {"name": "x", "method": "mean_difference", "positive": sides["good"], "negative": sides["bad"]}
    first = await tenants.send("POST", "/v1/vectors/train", ours.headers, json=body)
    await ours.counted()
    again = await tenants.send("POST", "/v1/vectors/train", ours.headers, json=body)
    assert first.status_code != 429
    error_of(again, 429, "rate_limit_exceeded")


async def test_trainings_set_their_prompts_aside(tenants: Tenants, error_of: ErrorCheck) -> None:
    ours = await client(tenants, tokens_per_minute=100)
    assert (await ours.complete("a", max_tokens=10)).status_code == 200

    async def train(num_each: int, text: str) -> httpx.Response:
        sides = {side: [f"{side} {n} {text}" for n in range(num_each)] for side in ("positive", "negative")}
        return await tenants.send("POST", "/v1/vectors/train", ours.headers, json={"name": "x", **sides})

    assert "asks for 100 tokens" in error_of(await train(4, "word " * 40), 429, "rate_limit_exceeded")
    error_of(await train(60, ""), 400, "request_beyond_limit")
    assert (await train(4, "")).status_code != 429


async def test_a_job_that_runs_has_set_aside_what_it_states(with_jobs: Any, error_of: ErrorCheck) -> None:
    async with with_jobs() as jobs:
        tenants = Tenants(jobs.server)
        await tenants.headers("operator", Scope.ADMIN)
        ours = await client(tenants, tokens_per_minute=100)
        sent = scripted("hang", invokes=[SentInvoke(prompt="a", sampling={"max_tokens": 90})])
        job = await tenants.send("POST", "/v1/jobs", {**ours.headers, **HEADERS}, content=sent)
        assert job.status_code == 202, job.text
        await wait_for_async(lambda: asyncio.sleep(0, jobs.engine.num_running == 1))
        error_of(await ours.complete("a", max_tokens=20), 429, "rate_limit_exceeded")
        jobs.engine.released.set()
        await wait_for_async(
            lambda: asyncio.sleep(0, not jobs.server.context.jobs.runner.num_running("acme"))
        )
        assert (await ours.complete("a", max_tokens=20)).status_code == 200
