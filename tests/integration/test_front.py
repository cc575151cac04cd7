"""The front of replicas, over servers with the fake engine and real sockets: what goes where."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from api_schemas.errors import ApiError, ErrorCode
from app.http.vllm_routes import OF_ONE_ENGINE
from app.replicas.protocol import ReplicaAddress
from app.replicas.relay import REPLICA_HEADER
from tests.fakes.results import MODEL
from tests.integration.fronted import Some, askers, asking, code_of, fronted, who
from tests.integration.scripted_traces import HEADERS, trace
from tests.waiting import wait_for_async

LONG = "once upon a time in a land far away there was a queen " * 8


async def test_answers_are_the_replicas_own_and_say_whose(tmp_path: Path):
    async with fronted(tmp_path) as front:
        answer = await front.complete(max_tokens=3)
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["text"].split()) == 3
        assert who(answer) in front.some.all
        assert answer.headers["x-request-id"]
        refused = await front.client.get("/v1/no/such/route")
        assert (refused.status_code, code_of(refused)) == (404, "not_found")
        assert (await front.client.get("/health/live")).json() == {"status": "ready"}
        assert (await front.client.get("/health/ready")).json() == {"status": "ready"}
        [card] = (await front.client.get("/v1/models")).json()["data"]
        assert card["id"] == MODEL


async def test_what_is_about_one_engine_is_not_sent_to_any(tmp_path: Path):
    async with fronted(tmp_path) as front:
        for method, path in itertools.product(("GET", "POST"), sorted(OF_ONE_ENGINE)):
            refused = await front.client.request(method, path)
            assert (refused.status_code, code_of(refused)) == (400, "unsupported_combination")


async def test_a_common_beginning_leads_to_one_replica_others_to_all(tmp_path: Path):
    async with fronted(tmp_path) as front:
        same = {who(await front.complete(f"{LONG}{number}", max_tokens=1)) for number in range(8)}
        others = {who(await front.complete(f"{number}{LONG}", max_tokens=1)) for number in range(20)}
        keys = {
            who(await front.client.post("/v1/completions", json={"prompt": LONG, "cache_salt": str(number)}))
            for number in range(20)
        }
        assert len(same) == 1
        assert len(others) == len(keys) == 2


async def test_events_arrive_as_they_are_made(tmp_path: Path):
    async with fronted(tmp_path) as front:
        for one in front.replicas:
            one.engine.behaviour.delay_s = 0.1
        loop = asyncio.get_running_loop()
        body = {"prompt": "a", "stream": True, "max_tokens": 4}
        async with front.client.stream("POST", "/v1/completions", json=body) as response:
            arrivals = [loop.time() async for line in response.aiter_lines() if line]
        assert len(arrivals) == 5
        assert arrivals[3] - arrivals[0] > 0.2
        await front.until_idle()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_ends_the_replicas_work(tmp_path: Path, is_stream: bool):
    async with fronted(tmp_path) as front:
        for one in front.replicas:
            one.engine.behaviour.delay_s = 30
        asking = asyncio.create_task(front.complete(stream=is_stream))
        await wait_for_async(lambda: any(one.engine.num_running for one in front.replicas))
        asking.cancel()
        await front.until_idle()
        assert sum(one.engine.num_calls for one in front.replicas) == 1


async def test_a_client_that_reads_nothing_of_its_stream_is_cut_off(tmp_path: Path):
    async with fronted(tmp_path, 1, client_stall_timeout_s=1) as front:
        request = json.dumps({"prompt": "w" * 20_000, "stream": True, "max_tokens": 2000, "n": 8})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", front.client.base_url.port, limit=1024)
        writer.write(f"{head}Content-Length: {len(request)}\r\n\r\n{request}".encode())
        [replica] = front.replicas
        await wait_for_async(lambda: replica.engine.num_running > 0)
        await front.until_idle()
        writer.close()


async def test_a_stream_whose_replica_is_killed_says_so_and_others_go_on(tmp_path: Path):
    async with fronted(tmp_path) as front:
        for one in front.replicas:
            one.engine.behaviour.delay_s = 0.05
        body, begun = {"stream": True, "max_tokens": 60}, set[int]()

        async def stream(number: int) -> tuple[str, str]:
            async with front.client.stream(
                "POST", "/v1/completions", json={"prompt": f"{number}{LONG}", **body}
            ) as response:
                lines = []
                async for line in response.aiter_lines():
                    lines += [line] if line else []
                    begun.add(number)
                *_, before, last = lines
                assert last == "data: [DONE]"
                found = json.loads(before.removeprefix("data: "))
                return who(response), found.get("error", {}).get("code", "")

        streams = [asyncio.create_task(stream(number)) for number in range(12)]
        await wait_for_async(lambda: len(begun) == 12)
        victim = front.some.all["m0r0"]
        victim.kill()
        ends = set(await asyncio.gather(*streams))
        assert ends == {("m0r0", "replica_lost"), ("m0r1", "")}
        # Who comes now is passed to the other one, whichever they would have gone to.
        answers = [await front.complete(f"{number}{LONG}", max_tokens=1) for number in range(12)]
        assert {(one.status_code, who(one)) for one in answers} == {(200, "m0r1")}
        assert (await front.client.get("/health/ready")).status_code == 200


async def test_what_a_killed_replica_had_not_answered_is_not_done_twice(tmp_path: Path):
    async with fronted(tmp_path) as front:
        for one in front.replicas:
            one.engine.behaviour.delay_s = 5
        asking = asyncio.create_task(front.complete(max_tokens=5))
        await wait_for_async(lambda: any(one.engine.num_running for one in front.replicas))
        [victim] = [one for one in front.replicas if one.engine.num_running]
        victim.kill()
        answer = await asking
        assert (answer.status_code, code_of(answer)) == (503, "replica_lost")
        assert answer.headers["retry-after"]
        assert sum(one.engine.num_calls for one in front.replicas) == 1


async def test_a_replica_that_refuses_is_passed_over_until_all_do(tmp_path: Path):
    async with fronted(tmp_path) as front:
        front.some.all["m0r0"].context.lifecycle.begin_drain()
        answers = [await front.complete(f"{number}{LONG}", max_tokens=1) for number in range(8)]
        assert {(one.status_code, who(one)) for one in answers} == {(200, "m0r1")}
        assert (await front.client.get("/health/ready")).status_code == 200
        front.some.all["m0r1"].context.lifecycle.begin_drain()
        answer = await front.complete()
        assert (answer.status_code, code_of(answer)) == (503, "draining")
        assert (await front.client.get("/health/ready")).status_code == 503
        assert (await front.client.get("/health/live")).status_code == 200


async def test_a_stopping_front_ends_requests_it_cannot_wait_for_with_an_error(tmp_path: Path):
    async with fronted(tmp_path, 1, drain_timeout_s=0.5) as front:
        [replica] = front.replicas
        replica.engine.behaviour.delay_s = 0.05
        body = {"prompt": "a", "stream": True, "max_tokens": 2000}
        async with front.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            front.server.should_exit = True
            await wait_for_async(
                lambda: front.server.config.app.state.components.lifecycle.phase == "draining"
            )
            refused = await front.complete()
            assert (refused.status_code, code_of(refused)) == (503, "draining")
            *_, before, last = [line async for line in lines if line]
        assert last == "data: [DONE]"
        assert json.loads(before.removeprefix("data: "))["error"]["code"] == "draining"
        await front.until_idle()


async def test_without_replicas_the_front_says_that_it_is_starting(tmp_path: Path):
    async with fronted(tmp_path, 0) as front:
        for answer in (await front.complete(), await front.client.get("/health/ready")):
            assert (answer.status_code, code_of(answer)) == (503, "starting")
        assert (await front.client.get("/metrics")).text == ""


async def test_results_are_fetched_from_the_replica_that_has_them(tmp_path: Path):
    async with fronted(tmp_path) as front:
        capture = [{"op": "capture", "at": ["layers.1.output"], "name": "c"}]
        urls = {}
        for number in range(8):
            answer = await front.complete(f"{number}{LONG}", max_tokens=1, interventions=capture)
            found = answer.json()["choices"][0]["interventions"]["results"]["c"]["points"]
            urls[who(answer)] = next(iter(found.values()))["url"]
        assert len(urls) == 2
        for name, url in urls.items():
            fetched = await front.client.get(url)
            assert (fetched.status_code, who(fetched)) == (200, name)
            assert int(fetched.headers["content-length"]) == len(fetched.content)
        front.some.all.pop("m0r0")
        gone = await front.client.get(urls["m0r0"])
        assert (gone.status_code, code_of(gone)) == (404, "result_not_found")


async def test_metrics_of_all_replicas_are_on_one_page(tmp_path: Path):
    async with fronted(tmp_path) as front:
        for number in range(12):
            await front.complete(f"{number}{LONG}", max_tokens=1)
        page = (await front.client.get("/metrics")).text
        families = {one.name: one for one in text_string_to_metric_families(page)}
        counts: collections.Counter[str] = collections.Counter()
        for sample in families["nnsight_engine_requests"].samples:
            if sample.name.endswith("_total") and sample.labels["route"] == "/v1/completions":
                counts[sample.labels["replica"]] += int(sample.value)
        assert set(counts) == {"m0r0", "m0r1"}
        assert sum(counts.values()) == 12


async def test_jobs_are_known_to_all_replicas_and_followed_through_any(tmp_path: Path):
    async with fronted(tmp_path) as front:
        ids = []
        for _ in range(6):
            answer = await front.client.post("/v1/jobs", content=trace("print hello"), headers=HEADERS)
            assert answer.status_code in {200, 202}, answer.text
            ids.append(answer.json()["id"])
        for job_id in ids:
            async with front.client.stream("GET", f"/v1/jobs/{job_id}/events") as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            assert json.loads(lines[-1].removeprefix("data: "))["status"] == "COMPLETED"
            address = f"ws://127.0.0.1:{front.client.base_url.port}/v1/jobs/{job_id}/events"
            for query in ("", "?local=true"):
                async with connect(f"{address}{query}") as socket:
                    await socket.send('{"type": "ping"}')
                    events = [json.loads(message) async for message in socket]
                    assert socket.close_code == 1000
                assert [one for one in events if one["type"] == "event"][-1]["status"] == "COMPLETED"
                assert socket.response is not None
                assert socket.response.headers[REPLICA_HEADER] in front.some.all
        with pytest.raises(InvalidStatus) as caught:
            async with connect(f"ws://127.0.0.1:{front.client.base_url.port}/v1/jobs/none/events"):
                pass
        assert caught.value.response.status_code == 404
        assert b"job_not_found" in caught.value.response.body


async def test_a_client_that_follows_a_job_through_the_front_is_called_by_any_replica(tmp_path: Path):
    """A job may be run by any replica, and by another one after that; the client cannot know which."""
    async with fronted(tmp_path) as front:
        answer = await front.client.post("/v1/jobs", content=trace("hang"), headers=HEADERS)
        job_id = answer.json()["id"]
        address = f"ws://127.0.0.1:{front.client.base_url.port}/v1/jobs/{job_id}/events?local=true"
        async with connect(address) as socket, asking(front.replicas, job_id):
            assert await askers(socket, 2) == {"m0r0", "m0r1"}


async def test_a_trace_goes_through_as_it_comes(tmp_path: Path):
    async def pieces() -> AsyncIterator[bytes]:
        sent = trace("print hello")
        for start in range(0, len(sent), 7):
            yield sent[start : start + 7]

    async with fronted(tmp_path) as front:
        answer = await front.client.post("/v1/traces", content=pieces(), headers=HEADERS)
        assert answer.status_code == 200
        assert b"COMPLETED" in answer.content
        assert answer.content.endswith(b"what was saved")


async def test_a_model_is_chosen_by_its_name_or_by_the_path(tmp_path: Path):
    async with fronted(tmp_path, 1, 2) as front:
        assert who(await front.complete(max_tokens=1)) == "m0r0"
        assert who(await front.complete(model=MODEL, max_tokens=1)) == "m0r0"
        # The fake engine has one name; that the other replicas refuse it is how they are known.
        answer = await front.complete(model="other/1")
        assert who(answer).startswith("m1")
        assert code_of(answer) == "model_not_found"
        assert who(await front.complete(model="other/1:calm")).startswith("m1")
        assert (await front.complete(model="nobody's")).status_code == 404
        for path in ("/v1/capabilities", "/v1/traces/outline", "/health/ready"):
            assert who(await front.client.get(f"/models/other/1{path}")).startswith("m1")
            assert who(await front.client.get(path)) == "m0r0"
        listed = (await front.client.get("/v1/models")).json()
        assert len(listed["data"]) == 2
        for name, status in ((MODEL, 200), ("nobody's", 404)):
            one = await front.client.get(f"/v1/models/{name}")
            assert one.status_code == status
            assert one.json() in listed["data"] or code_of(one) == "model_not_found"
        run = await front.client.post("/models/other/1/v1/traces", content=trace("print a"), headers=HEADERS)
        assert who(run).startswith("m1")


@pytest.mark.parametrize(("proxies", "expected"), [("127.0.0.1", "203.0.113.9"), ("192.0.2.1", "127.0.0.1")])
async def test_the_address_of_a_client_is_the_clients(tmp_path: Path, proxies: str, expected: str):
    """Else who guesses keys would have everybody shut out, or nobody, whatever they say of themselves."""
    async with fronted(tmp_path, 1, 1, proxies=proxies) as front:
        seen: list[Any] = []
        for one in front.replicas:
            found: Callable[..., Any] = one.context.keys.principal

            async def principal(
                authorization: str | None, address: str, found: Callable[..., Any] = found
            ) -> Any:
                seen.append(address)
                return await found(authorization, address)

            object.__setattr__(one.context.keys, "principal", principal)
        for path in ("/v1/capabilities", "/v1/models", "/metrics"):
            await front.client.get(path, headers={"x-forwarded-for": "203.0.113.9"})
        # The front trusts proxies of its own as every server does, and replicas trust the front.
        assert seen == [expected] * 5


async def test_a_body_that_is_not_passed_on_takes_no_other_requests_place(tmp_path: Path):
    async with fronted(tmp_path, 1, 1) as front:
        for path, head in itertools.product(
            ("/v1/models", "/metrics", "/v1/capabilities"),
            ("Content-Length: 64", "Transfer-Encoding: chunked"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.client.base_url.port)
            body = b"x" * 64 if "Length" in head else b"1\r\nx\r\n0\r\n\r\n"
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n\r\n"
            writer.write(request.encode() + body)
            assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200 ")
            writer.close()
            for _ in range(4):
                answers = [await front.client.get(one) for one in ("/v1/models", "/v1/capabilities")]
                assert [one.status_code for one in answers] == [200, 200]


async def test_one_model_without_replicas_holds_up_no_other(tmp_path: Path):
    async with fronted(tmp_path, 0, 2) as front:
        listed = (await front.client.get("/v1/models")).json()["data"]
        assert len(listed) == 2
        assert MODEL in {one["id"] for one in listed}
        for one in listed:
            assert (await front.client.get(f"/v1/models/{one['id']}")).json() == one
        for name in front.models[1].all:
            missing = await front.client.get(f"/v1/results/{name}.none")
            assert who(missing) == name
        gone = await front.client.get("/v1/results/m0r0.none")
        assert (gone.status_code, code_of(gone)) == (404, "result_not_found")
        ready = await front.client.get("/health/ready")
        assert (ready.status_code, code_of(ready)) == (503, "starting")
        assert (await front.client.get("/models/other/1/health/ready")).status_code == 200


async def test_large_bodies_are_accepted_from_clients_that_replicas_admit(tmp_path: Path):
    async with fronted(tmp_path, 1, max_received_bytes=3_000_000, tenant_share=0.2) as front:
        kind = {"content-type": "application/json"}
        # Without keys a request may have all that there is, and is told when that is too little.
        full = await front.client.post("/v1/completions", content=b" " * 4_000_000, headers=kind)
        assert (full.status_code, code_of(full)) == (429, "rate_limit_exceeded")
        taken = await front.client.post("/v1/completions", content=b" " * 1_500_000, headers=kind)
        assert (taken.status_code, code_of(taken)) == (400, "invalid_json")
        # One that need not be asked about has a share, as nobody knows yet who sends it.
        small = await front.client.post("/v1/completions", content=b" " * 700_000, headers=kind)
        assert (small.status_code, code_of(small)) == (429, "rate_limit_exceeded")
        [replica] = front.replicas
        object.__setattr__(replica.context.keys, "principal", refuse)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.client.base_url.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 2000000\r\n\r\n".encode())  # and nothing of the body
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 50)
        assert answer.startswith(b"HTTP/1.1 401 ")
        writer.close()


async def refuse(_authorization: str | None, _address: str) -> Any:
    raise ApiError(ErrorCode.INVALID_KEY, "no such key")


async def test_a_socket_is_led_past_a_replica_that_is_not_there(tmp_path: Path):
    async with fronted(tmp_path) as front:
        answer = await front.client.post("/v1/jobs", content=trace("print hello"), headers=HEADERS)
        address = f"ws://127.0.0.1:{front.client.base_url.port}/v1/jobs/{answer.json()['id']}/events"
        front.some.all["m0r0"].kill()
        for _ in range(6):
            async with connect(address) as socket:
                assert socket.response is not None
                assert socket.response.headers[REPLICA_HEADER] == "m0r1"


async def test_a_client_that_disconnects_while_waiting_for_a_replica_leaves_the_queue(tmp_path: Path):
    async with fronted(tmp_path, 1) as front:
        waiting = Waiting([])
        front.models[0] = waiting
        asking = asyncio.create_task(front.complete())
        await wait_for_async(lambda: waiting.num_waiting == 1)
        asking.cancel()
        await wait_for_async(lambda: waiting.num_waiting == 0)


class Waiting(Some):
    """Replicas of which none is free."""

    num_waiting = 0

    @contextlib.asynccontextmanager
    async def acquire(self, *_asked: Any, **_wanted: Any) -> AsyncGenerator[ReplicaAddress, None]:
        self.num_waiting += 1
        try:
            await asyncio.Event().wait()
            yield ReplicaAddress("", "")
        finally:
            self.num_waiting -= 1


async def test_the_front_may_be_below_a_path(tmp_path: Path):
    async with fronted(tmp_path, 1, 1, prefix="/engine") as front:
        assert who(await front.client.get("/engine/v1/capabilities")) == "m0r0"
        assert who(await front.client.get("/engine/models/other/1/v1/capabilities")) == "m1r0"
        assert (await front.client.get("/engine/health/ready")).status_code == 200
        assert (await front.client.get("/engine/health/live")).status_code == 200
