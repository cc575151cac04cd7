"""Every way a request can be refused: status, code, and OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from api_schemas.errors import ApiError, ErrorCode
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Serve

JSON = {"content-type": "application/json"}
STEER = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * 8}


NO_REQUESTS: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"\xff", 400, "invalid_json"),
    (b'{"a": ' + b"1" * 5000 + b"}", 400, "invalid_json"),
    (b"[]", 422, "invalid_shape"),
    (b"3", 422, "invalid_shape"),
    (b'{"temperature": NaN}', 400, "not_finite"),
    (b'{"temperature": -Infinity}', 400, "not_finite"),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "json_too_deep"),
    (b"[" * 500_000, 400, "json_too_deep"),
    (b'{"a":' * 100_000, 400, "json_too_deep"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies_that_are_no_request(serve: Serve, error_of: ErrorCheck, path: str):
    async with serve() as server:
        for body, status, code in NO_REQUESTS:
            error_of(await server.client.post(path, content=body, headers=JSON), status, code)
        assert server.engine.num_calls == 0


async def test_other_content_types_are_refused(serve: Serve, error_of: ErrorCheck):
    async with serve() as server:
        response = await server.client.post(
            "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}
        )
        assert "application/json" in error_of(response, 400, "bad_request")


async def test_a_chunked_body_over_the_limit_is_not_read_to_its_end(serve: Serve, error_of: ErrorCheck):
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b" " * 1000

    async with serve(max_body_bytes=5000) as server:
        response = await server.client.post("/v1/completions", content=endless(), headers=JSON)
        error_of(response, 413, "body_too_large")
        assert num_sent < 10


UNREADABLE: list[tuple[object, int, str]] = [
    ({"op": "steer"}, 422, "invalid_shape"),
    ("steer", 422, "invalid_shape"),
    ([{"op": "teleport"}], 400, "unknown_operation"),
    ([{"op": "\ud800"}], 400, "invalid_json"),
    ([{**STEER, "scale": True}], 422, "invalid_shape"),
    ([{**STEER, "surprise": 1}], 422, "invalid_shape"),
    ([STEER] * 5, 400, "too_many_operations"),
    ([{**STEER, "vector": {"dtype": "float32", "shape": [2], "data": "???"}}], 400, "wrong_encoding"),
]


async def test_interventions_that_cannot_be_read(serve: Serve, error_of: ErrorCheck):
    async with serve(max_operations=4) as server:
        for interventions, status, code in UNREADABLE:
            content = json.dumps({"prompt": "a", "interventions": interventions}).encode()
            error_of(await server.client.post("/v1/completions", content=content, headers=JSON), status, code)
        overflow = json.dumps({"prompt": "a", "interventions": [STEER]}).replace("1.0", "1e999", 1)
        answer = await server.client.post("/v1/completions", content=overflow, headers=JSON)
        error_of(answer, 400, "not_finite")
        huge = await server.complete(interventions=[{**STEER, "scale": 10**400}])
        assert 400 <= huge.status_code < 500, huge.text
        assert server.engine.num_calls == 0


async def test_no_interventions_in_any_form_is_a_plain_request(serve: Serve):
    async with serve() as server:
        plain = (await server.complete()).json()
        nothings: tuple[object, ...] = (None, [])
        for nothing in nothings:
            assert (await server.complete(interventions=nothing)).json() == plain
        assert "interventions" not in plain["choices"][0]


async def test_unknown_routes_and_methods_have_the_same_error_shape(serve: Serve, error_of: ErrorCheck):
    async with serve() as server:
        error_of(await server.client.get("/nowhere"), 404, "not_found")
        error_of(await server.client.get("/v1/nowhere"), 404, "not_found")
        wrong = await server.client.get("/v1/completions")
        error_of(wrong, 405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


async def test_the_engines_error_reaches_the_client_as_it_is(serve: Serve, error_of: ErrorCheck):
    error = ApiError(
        ErrorCode.WRONG_WIDTH, "`vector` must have 576 numbers, got 8.", "interventions.0.vector"
    )
    async with serve(FakeBehaviour(error=error)) as server:
        for is_stream in (False, True):
            response = await server.complete(stream=is_stream)
            assert error_of(response, 400, "wrong_width") == error.message
            assert response.json()["error"]["param"] == "interventions.0.vector"


async def test_an_error_message_may_hold_anything(serve: Serve, error_of: ErrorCheck):
    error = ApiError(ErrorCode.UNKNOWN_TOKEN, "token '\ud800\n\x00é' is not one token", "\udfff")
    async with serve(FakeBehaviour(error=error)) as server:
        error_of(await server.complete(), 400, "unknown_token")


async def test_an_internal_error_is_logged_and_reveals_nothing(
    serve: Serve, error_of: ErrorCheck, caplog: pytest.LogCaptureFixture
):
    async with serve(FakeBehaviour(error=RuntimeError("secret path /etc/x"))) as server:
        message = error_of(await server.complete(), 500, "internal_error")
        assert "secret" not in message
        assert "secret path /etc/x" in caplog.text
        server.engine.behaviour.error = None
        assert (await server.complete()).status_code == 200
