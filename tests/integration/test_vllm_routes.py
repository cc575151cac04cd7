"""Requests to routes that vLLM's own application answers: what reaches it, and what is refused before."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api_schemas.administration import Limits, Scope
from api_schemas.errors import ApiError
from api_schemas.interventions import FIELD
from app.engine.stored_responses import MAX_OF_TENANT, stores_of_responses
from app.formats.json_text import encoded_json
from app.http.vllm_routes import LOAD_ADAPTER, RESPONSES, VLLM_ROUTES
from app.services.passing_on import MAX_OBJECTS, check_body, num_texts
from app.storage.audit import AuditFilter, AuditStore
from nnsight_engine.core.work_context import WorkContext, working_for
from tests.fakes.results import MODEL
from tests.fakes.vllm_app import num_open
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.tenants import Tenants

JSON_ROUTES = [route for route in VLLM_ROUTES if route.has_body]


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve(max_choices=3, max_body_bytes=2000) as found:
        yield found


async def sent(tenants: Tenants, path: str, headers: dict[str, str], **body: Any) -> Any:
    answer = await tenants.send("POST", path, headers, json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("path", "place"), [("/v1/messages", "body"), ("/v1/responses", "request")])
async def test_the_prefix_cache_of_a_tenant_is_its_own(server: Server, path: str, place: str) -> None:
    tenants = Tenants(server)
    one, same, other = [await tenants.headers(name) for name in ("acme", "acme", "rival")]
    found = [await sent(tenants, path, each) for each in (one, same, other)]
    salts = [each[place]["cache_salt"] for each in found]
    assert salts[0] == salts[1] != salts[2]
    chosen = await sent(tenants, path, one, cache_salt="mine")
    assert chosen[place]["cache_salt"] not in {"mine", salts[0]}


@pytest.mark.parametrize(("path", "place"), [("/v1/messages", "body"), ("/v1/responses", "request")])
async def test_operations_leave_the_body_and_reach_the_engine(
    server: Server, error_of: ErrorCheck, path: str, place: str
) -> None:
    tenants = Tenants(server)
    allowed = await tenants.headers("acme", Scope.COMPLETIONS, Scope.INTERVENTIONS)
    body = {"stream": True, "interventions": [{"op": "capture", "at": "layers.0.output"}]}
    found = await sent(tenants, path, allowed, **body)
    assert FIELD not in found[place]
    operations, streams = server.engine.passed_on
    assert ([one.op for one in operations], streams) == (["capture"], True)
    other = await tenants.headers("rival", Scope.COMPLETIONS)
    error_of(await tenants.send("POST", path, other, json=body), 403, "missing_scope")
    unknown = {"interventions": [{"op": "steer", "at": "layers.0.output", "vector": {"name": "nobody"}}]}
    error_of(await tenants.send("POST", path, allowed, json=unknown), 400, "unknown_vector")


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_the_key_is_checked_here_and_goes_no_further(server: Server, header: str) -> None:
    tenants = Tenants(server)
    key = (await tenants.headers("acme"))["authorization"].removeprefix("Bearer ")
    headers = {header: key if header == "x-api-key" else f"Bearer {key}"}
    found = await sent(tenants, "/v1/messages", headers, max_tokens=1)
    assert not {"authorization", "x-api-key"} & set(found["headers"])
    refused = await tenants.send("POST", "/v1/messages", {header: f"{headers[header]}x"}, json={})
    assert refused.status_code == 401


@pytest.mark.parametrize("route", JSON_ROUTES, ids=str)
async def test_bodies_have_the_limits_of_all_routes(server: Server, error_of: ErrorCheck, route: Any) -> None:
    headers = await Tenants(server).headers("acme")

    async def post(content: str, kind: str = "application/json") -> Any:
        given = {**headers, "content-type": kind}
        return await server.client.post(route.path, content=content, headers=given)

    error_of(await post(json.dumps({"input": "x" * 3000})), 413, "body_too_large")
    error_of(await post("[" * 70 + "]" * 70), 400, "json_too_deep")
    error_of(await post("{"), 400, "invalid_json")
    error_of(await post("{}", "text/plain"), 400, "bad_request")
    refusal = (422, "invalid_shape") if route.intervenes else (400, "unsupported_combination")
    error_of(await post('{"interventions": [1]}'), *refusal)


ITEMS = [{"role": "user", "content": "x"}] * (MAX_OBJECTS + 1)


@pytest.mark.parametrize(
    ("field", "given", "code"),
    [
        ("background", "1", "invalid_value"),
        ("background", [], "invalid_value"),
        ("input", ITEMS, "invalid_value"),
        ("input", [{"role": "user", "content": ITEMS[:100]}], "invalid_value"),
        ("input", list(range(MAX_OBJECTS + 1)), "invalid_value"),
        ("tools", ITEMS, "invalid_value"),
        ("user", "x" * 600, "invalid_value"),
        ("vllm_xargs", {"kv_transfer_params": "x"}, "invalid_value"),
        ("intervention", [1], "invalid_shape"),
        ("extra_body", {"interventions": [1]}, "invalid_shape"),
    ],
)
async def test_what_costs_the_handlers_too_much_is_refused(
    serve: Serve, field: str, given: Any, code: str
) -> None:
    async with serve() as server:
        answer = await server.client.post("/v1/responses", json={"input": "x", field: given})
        assert answer.status_code in {400, 422}, answer.text
        assert answer.json()["error"]["code"] == code


EMBEDDING = next(route for route in JSON_ROUTES if route.has_many)


@pytest.mark.parametrize("field", ["input", "documents", "text_2"])
@pytest.mark.parametrize(
    "texts",
    [[1.5] * 5, ["a", 1], [[1], "a"], [[1, None]], [[["a"]]], ["a"] * 4, [[1]] * 4, [None], [*range(9)]],
    ids=str,
)
def test_wrong_and_too_many_texts_are_refused_at_once(field: str, texts: Any) -> None:
    """VLLM reports several errors for each item, and gathers all of them in one turn of the event loop."""
    with pytest.raises(ApiError) as refused:
        check_body(EMBEDDING, {field: texts}, 8, 3)
    assert (refused.value.code, refused.value.param) == ("invalid_value", field)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"input": "a"}, 1),
        ({"input": [1, 2, 3]}, 1),
        ({"input": ["a", "b"]}, 2),
        ({"input": [[1], [2, 3]]}, 2),
        ({"input": [{"role": "user", "content": "a"}] * 3}, 1),
        ({"messages": [{"role": "user", "content": "a"}] * 3}, 1),
        ({"messages": [[{"role": "user", "content": "a"}]] * 3}, 3),
    ],
    ids=str,
)
def test_prompts_are_counted_as_vllm_makes_them(fields: Any, count: int) -> None:
    assert num_texts(fields) == count


@pytest.mark.parametrize(
    "path", ["/v1/traces", "/v1/vectors/train", "/v1/detectors/train", "/v1/sweeps", "/v1/jobs"]
)
async def test_a_presets_header_is_refused_where_presets_do_not_act(
    server: Server, error_of: ErrorCheck, path: str
) -> None:
    headers = await Tenants(server).headers("acme")
    answer = await server.client.post(path, json={}, headers={**headers, "x-nnsight-preset": "calm"})
    error_of(answer, 400, "unsupported_combination")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_tokens_are_counted_for_a_model_with_a_preset(server: Server, path: str) -> None:
    tenants = Tenants(server)
    body = {"prompt": "x", "messages": [], "model": f"{MODEL}:calm"}
    found = await tenants.send("POST", path, await tenants.headers("acme"), json=body)
    assert found.json()["body"]["model"] == MODEL


@pytest.mark.parametrize("route", JSON_ROUTES, ids=str)
async def test_texts_beyond_the_models_context_are_not_tokenized(
    serve: Serve, error_of: ErrorCheck, route: Any
) -> None:
    async with serve() as server:
        longest = server.context.engine.capabilities().sizes.max_model_len * 32
        body = {"prompt": "a" * (longest // 2), "messages": [{"content": "b" * longest}]}
        tenants = Tenants(server)
        headers = await tenants.headers("acme")
        error_of(await tenants.send("POST", route.path, headers, json=body), 400, "invalid_value")


@pytest.mark.parametrize(("size", "is_stored"), [(1000, None), (70_000, False)])
def test_large_responses_are_not_stored(size: int, is_stored: bool | None) -> None:
    text = "x" * size
    for more in (
        {"input": text},
        {"input": [{"content": [{"type": "input_image", "image_url": text}]}]},
        {"tools": [{"type": "function", "parameters": {"properties": {text: {}}}}]},
        {"metadata": {"padding": text}},
    ):
        fields: dict[str, Any] = {"input": "x", **more}
        check_body(next(route for route in JSON_ROUTES if route.path == RESPONSES), fields, 100_000, 10)
        assert fields.get("store") is is_stored


async def test_a_large_body_is_encoded_again_while_the_event_loop_runs() -> None:
    value: dict[str, Any] = {
        "text": '\x00"\\é\U0001f600' * 200_000, "empty": [{}, [], "", {"": None}],
        "numbers": [0.1, -1e300, 10**30, True, False] * 50_000,
    }  # fmt: skip
    num_turns = 0

    async def counting() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(counting())
    encoded = await encoded_json(value)
    task.cancel()
    assert encoded == json.dumps(value).encode()
    assert num_turns > len(encoded) // 2**20


@dataclasses.dataclass
class Response:
    status: str


def test_responses_under_way_are_kept_and_refused_above_the_limit() -> None:
    stores = stores_of_responses()
    responses, messages = stores["response_store"], stores["msg_store"]
    under_way = [Response("queued" if index % 2 else "in_progress") for index in range(MAX_OF_TENANT - 1)]
    with working_for(WorkContext(tenant="acme")):
        for index, one in enumerate(under_way):
            messages[f"b{index}"] = responses[f"b{index}"] = one
        for index in range(3 * MAX_OF_TENANT):
            messages[f"s{index}"] = responses[f"s{index}"] = Response("completed")
        assert list(responses) == [*(f"b{index}" for index in range(len(under_way))), "s299"]
        assert set(responses) <= set(messages)
        responses["last"] = Response("queued")
        with pytest.raises(ApiError) as caught:
            responses["more"] = Response("queued")
        assert caught.value.code == "queue_full"
        assert "more" not in responses
        responses["more"] = Response("completed")  # its client has the answer
        assert "more" not in responses
    with working_for(WorkContext(tenant="rival")):
        responses["other"] = Response("queued")
    with working_for(WorkContext(tenant="acme")):
        under_way[7].status = "failed"
        responses["more"] = Response("queued")
        assert "b7" not in responses
        assert len(responses) == MAX_OF_TENANT


async def test_tokens_are_counted_before_the_engine_works(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve() as server:
        tenants = Tenants(server)
        headers = await tenants.headers("acme", limits=Limits(tokens_per_minute=50))
        body = {"input": "x", "max_output_tokens": 60}
        answer = await tenants.send("POST", "/v1/responses", headers, json=body)
        error_of(answer, 400, "request_beyond_limit")


async def test_what_only_operators_do_needs_their_scope(server: Server, error_of: ErrorCheck) -> None:
    tenants = Tenants(server)
    user = await tenants.headers("acme", Scope.COMPLETIONS)
    operator = await tenants.headers("op", Scope.ADMIN)
    for route in VLLM_ROUTES:
        if route.scope is Scope.ADMIN:
            body: dict[str, Any] = {"json": {}} if route.has_body else {}
            error_of(await tenants.send(route.method, route.path, user, **body), 403, "missing_scope")
            assert (await tenants.send(route.method, route.path, operator, **body)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/tokenize"])
async def test_nothing_is_passed_on_while_the_engine_starts(
    serve: Serve, error_of: ErrorCheck, path: str
) -> None:
    async with serve() as server:
        server.engine.behaviour.is_starting = True
        error_of(await server.client.post(path, json={}), 503, "starting")
        assert (await server.client.get("/health")).status_code == 503


async def test_a_stream_ends_at_the_deadline_with_an_error_of_its_api(serve: Serve) -> None:
    async with serve(request_timeout_s=0.3) as server:
        answer = await server.client.post("/v1/messages", json={"wait": 1})
        last = answer.text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\n")
        assert json.loads(last.partition("data: ")[2])["type"] == "error"
        answer = await server.client.post("/tokenize", json={"wait": 1})
        assert answer.text.endswith("data: [DONE]\n\n")
        await asyncio.sleep(0.05)
        assert not num_open


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses/x"])
async def test_a_stream_that_fails_ends_with_an_error(serve: Serve, path: str) -> None:
    async with serve() as server:
        method = "POST" if path == "/v1/messages" else "GET"
        answer = await server.client.request(method, path, json={"fail": 1}, params={"fail": "1"})
        events = answer.text.strip().split("\n\n")
        assert events[0] == "data: {}"
        assert events[1].startswith("event: error\ndata: ")
        assert "quota of mine" in events[1]


async def test_the_audit_log_names_the_adapter_that_was_loaded(server: Server) -> None:
    tenants = Tenants(server)
    operator = await tenants.headers("op", Scope.ADMIN)
    await sent(tenants, LOAD_ADAPTER, operator, lora_name="pirate", lora_path="/srv/pirate")
    await server.context.log.flush()
    found, _ = await AuditStore(server.context.database).page(AuditFilter(), limit=1)
    assert (found[0].route, found[0].subject) == (LOAD_ADAPTER, "pirate")
