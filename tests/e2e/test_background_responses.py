"""Responses in the background: read later, cancelled, and counted for as long as they are under way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.keyed import keys_in
from tests.e2e.live import MODEL, Live, live_server
from tests.narrow_model import WIDTH
from tests.waiting import wait_for_async

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

LIMIT_S = 10.0
TEXT = "Name a colour."
SHORT, LONG = 20, 900
STEER = {"op": "steer", "at": "layers.15.output", "vector": [0.0] * WIDTH, "scale": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def keys(data: Path) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        yield keys_in(data, acme=(), rival=(), operator=("--scopes", "admin"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(
    narrow: Path, data: Path, keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Live]:
    settings = {"request_timeout_s": LIMIT_S, "data_dir": data, "max_engine_restarts": 1}
    async with live_server(narrow, tmp_path_factory.mktemp("results"), **settings) as live:
        path, headers = "/v1/admin/tenants/acme/limits", {"authorization": f"Bearer {keys['operator']}"}
        assert (await live.http.put(path, json={"concurrency": 1}, headers=headers)).is_success
        yield live


class Tenant:
    def __init__(self, live: Live, key: str) -> None:
        self.http = live.http
        self.headers = {"authorization": f"Bearer {key}"}

    async def post(self, path: str = "/v1/responses", **body: Any) -> httpx.Response:
        return await self.http.post(path, headers=self.headers, json=body)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path, headers=self.headers)

    async def create(self, num_tokens: int, **others: Any) -> httpx.Response:
        body = {"model": MODEL, "input": TEXT, "max_output_tokens": num_tokens, "temperature": 0, **others}
        return await self.post(**body, ignore_eos=True)

    async def begin(self, num_tokens: int) -> str:
        answer = await self.create(num_tokens, background=True)
        assert (answer.status_code, answer.json()["status"]) == (200, "queued"), answer.text
        return str(answer.json()["id"])

    async def ended(self, response_id: str) -> dict[str, Any]:
        await wait_for_async(self.is_idle, 300)
        found: dict[str, Any] = (await self.get(f"/v1/responses/{response_id}")).json()
        return found

    async def is_idle(self) -> bool:
        return not await self.num_running()

    async def num_running(self) -> int:
        return int((await self.get("/v1/status")).json()["in_flight"])


@pytest.fixture
def acme(live: Live, keys: dict[str, str]) -> Tenant:
    return Tenant(live, keys["acme"])


async def test_it_is_read_later_and_counts_until_it_has_ended(
    live: Live, keys: dict[str, str], acme: Tenant
) -> None:
    expected = (await acme.create(SHORT)).json()
    response_id = await acme.begin(SHORT)
    assert await acme.num_running() == 1
    refused = await acme.create(SHORT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    found = await acme.ended(response_id)
    assert found["status"] == expected["status"] == "incomplete"  # its length is limited
    assert found["output"][0]["content"] == expected["output"][0]["content"]
    assert found["usage"]["output_tokens"] == SHORT
    operator = Tenant(live, keys["operator"])

    async def are_counted() -> bool:
        audit = (await operator.get("/v1/admin/audit?tenant=acme")).json()["data"]
        entries = [one for one in audit if one["status"] == 200 and one["route"] == "/v1/responses"]
        return [one["tokens"] for one in entries] == [found["usage"]["total_tokens"]] * 2

    await wait_for_async(are_counted)  # they are written a moment later
    assert (await acme.create(SHORT)).status_code == 200


async def test_one_that_is_cancelled_leaves_the_engine_and_its_place(live: Live, acme: Tenant) -> None:
    response_id = await acme.begin(LONG)
    cancelled = await acme.post(f"/v1/responses/{response_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert (await acme.ended(response_id))["status"] == "cancelled"
    assert live.engine.engine.get_num_unfinished_requests() == 0
    again = await acme.post(f"/v1/responses/{response_id}/cancel")
    assert again.status_code == 400


async def test_one_that_takes_longer_than_a_request_may_has_failed(live: Live, acme: Tenant) -> None:
    response_id = await acme.begin(LONG)
    assert (await acme.ended(response_id))["status"] == "failed"
    assert live.engine.engine.get_num_unfinished_requests() == 0


async def test_other_tenants_do_not_find_it(live: Live, keys: dict[str, str], acme: Tenant) -> None:
    response_id, rival = await acme.begin(1), Tenant(live, keys["rival"])
    assert (await rival.get(f"/v1/responses/{response_id}")).status_code == 404
    assert (await rival.post(f"/v1/responses/{response_id}/cancel")).status_code == 404
    assert (await acme.ended(response_id))["status"] == "incomplete"


@pytest.mark.parametrize(
    ("field", "value"),
    [("stream", True), ("interventions", [STEER]), ("store", False), ("store", "no")],
)
async def test_what_cannot_be_combined_with_it_is_named(acme: Tenant, field: str, value: Any) -> None:
    answer = await acme.create(SHORT, **{"background": True, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_combination", field)
    assert await acme.num_running() == 0


async def test_its_events_cannot_be_read_later(acme: Tenant) -> None:
    answer = await acme.get("/v1/responses/resp_1?stream=true&starting_after=2")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_a_response_that_fails_before_its_first_token_is_failed(acme: Tenant) -> None:
    answer = await acme.create(SHORT, background=True, logit_bias={"99999999": 1})
    assert answer.status_code == 200, answer.text
    assert (await acme.ended(answer.json()["id"]))["status"] == "failed"


async def test_its_id_is_chosen_by_the_server(acme: Tenant) -> None:
    answer = await acme.create(SHORT, background=True, request_id="mine")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


async def test_one_under_way_when_the_engine_dies_has_failed_and_others_are_still_read(
    live: Live, acme: Tenant
) -> None:
    done = (await acme.create(SHORT)).json()
    response_id = await acme.begin(LONG)
    live.engine.engine.kill()

    async def serves() -> bool:
        return (await acme.create(1)).status_code == 200

    await wait_for_async(serves, 300)
    found = (await acme.get(f"/v1/responses/{response_id}")).json()
    assert found["status"] == "failed"
    kept = (await acme.get(f"/v1/responses/{done['id']}")).json()
    assert kept["output"][0]["content"] == done["output"][0]["content"]
    again = await acme.create(SHORT, previous_response_id=done["id"])
    assert again.json()["usage"]["input_tokens"] > done["usage"]["input_tokens"]
