"""Traces over HTTP: the order of frames, refusals, and the senders whose code is accepted."""

from __future__ import annotations

import json
import struct

import httpx
import pytest
import torch

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.remote_backend.frames import MEDIA_TYPE, FrameKind, tier_of
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.remote_backend.values.outcomes import read_outcomes
from tests.fakes.engine import FakeBehaviour
from tests.fakes.results import FINGERPRINT, MODEL
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.scripted_traces import HEADERS, answered, message, told


async def run(server: Server, content: bytes | None = None, **headers: str) -> httpx.Response:
    sent = message() if content is None else content
    return await server.client.post("/v1/traces", content=sent, headers={**HEADERS, **headers})


async def test_the_response_has_all_events_in_order_and_ends_with_the_result(serve: Serve) -> None:
    async with serve() as server:
        behaviour = server.engine.fake_traces.behaviour
        behaviour.logs, behaviour.saves = ["hello", "there"], {"x": torch.ones(3)}
        response = await run(server)
        frames = answered(response)
        assert list(told(frames)) == [
            *("RECEIVED", "DISPATCHED", "RUNNING", "LOG", "LOG"),
            *("OUTPUTS", "COMPLETED", "RESULT"),
        ]
        assert response.headers["content-type"] == MEDIA_TYPE
        assert response.headers["nnsight-engine"] == "vllm"
        assert frames[0].json()["job"] == response.headers["nnsight-job-id"]
        assert frames[1].json()["engine"] == "vllm"
        assert [frame.json()["message"] for frame in frames[3:5]] == ["hello", "there"]
        assert tier_of(frames) == "tap"
        (outcome,) = read_outcomes(frames[-1].data, [])
        assert outcome.saves["x"].tolist() == [1.0, 1.0, 1.0]


NO_TRACES: list[tuple[bytes, str, int]] = [
    (b"", "invalid_trace", 400),
    (b"NNSR", "invalid_trace", 400),
    (b"NNSR" + struct.pack("<BxxxI", 1, 2**31), "invalid_trace", 400),
    (b"NNSR" + struct.pack("<BxxxI", 9, 2) + b"{}", "invalid_trace", 400),
    (b"NNSR" + struct.pack("<BxxxI", 1, 1500) + b"[" * 1500, "invalid_trace", 400),
    (message()[:-1], "invalid_trace", 400),
    (message() + b"x", "invalid_trace", 400),
    (message(model="another/model"), "model_not_found", 404),
    (message(model="another/model", fingerprint=FINGERPRINT), "model_not_found", 404),
    (message(model="/other/folder", fingerprint="of another"), "model_not_found", 404),
    (message(dialect="transformers"), "unsupported_combination", 400),
    (message(engine="local"), "unsupported_combination", 400),
    (message(blocks=b"x" * 3000), "body_too_large", 413),
]


async def test_what_is_no_trace_for_this_server_is_refused(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(max_trace_request_bytes=2000) as server:
        for content, code, status in NO_TRACES:
            error_of(await run(server, content), status, code)
        assert not server.engine.fake_traces.heads


async def test_only_the_traces_own_content_type_is_read(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve() as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            response = await run(server, None, **{"content-type": kind})
            assert "application/vnd.nnsight.trace" in error_of(response, 400, "bad_request")


@pytest.mark.parametrize(
    ("settings", "host", "allowed"),
    [
        ({}, "localhost:8000", True),
        ({}, "127.0.0.1", True),
        ({}, "[::1]:8000", True),
        ({"host": "0.0.0.0"}, "localhost", False),
        ({"host": "::"}, "localhost", False),
        ({"host": "0.0.0.0", "allow_code": True}, "gpu7.example", True),
        ({"allow_code": False}, "localhost", False),
    ],
)
async def test_which_keys_may_send_code(
    serve: Serve, error_of: ErrorCheck, settings: dict[str, object], host: str, allowed: bool
) -> None:
    async with serve(**settings) as server:
        response = await run(server, host=host)
        if allowed:
            answered(response)
        else:
            assert "NNSIGHT_ENGINE_ALLOW_CODE" in error_of(response, 403, "code_not_allowed")
            assert not server.engine.fake_traces.heads


async def test_an_error_before_the_first_frame_has_its_status(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve() as server:
        server.engine.fake_traces.behaviour.error = ApiError(ErrorCode.INVALID_VALUE, "no", "invokes.0")
        response = await run(server)
        assert error_of(response, 400, "invalid_value") == "no"
        server.engine.fake_traces.behaviour.error = RuntimeError("a secret")
        assert "secret" not in error_of(await run(server), 500, "internal_error")


@pytest.mark.parametrize(
    ("error", "code"),
    [(ApiError(ErrorCode.ENGINE_DEAD, "gone"), "engine_dead"), (RuntimeError("a secret"), "internal_error")],
)
async def test_a_later_error_is_the_last_frame(serve: Serve, error: Exception, code: str) -> None:
    async with serve() as server:
        server.engine.fake_traces.behaviour.late_error = error
        frames = answered(await run(server))
        assert list(told(frames)) == ["RECEIVED", "DISPATCHED", "RUNNING", "ERROR"]
        assert frames[-1].json()["error"]["code"] == code
        assert b"secret" not in bytes(frames[-1].data)


async def test_traces_wait_for_the_engine_and_the_status_does_not(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve(FakeBehaviour(is_starting=True)) as server:
        error_of(await run(server), 503, "starting")
        starting = (await server.client.get("/v1/status")).json()
        assert (starting["phase"], starting["models"][0]["running"]) == ("starting", False)
        server.engine.behaviour.is_starting = False
        ready = (await server.client.get("/v1/status")).json()
        assert ready["phase"] == "ready"
        (model,) = ready["models"]
        assert (model["name"], model["names"], model["running"]) == (MODEL, [MODEL], True)
        assert (model["fingerprint"], model["engines"]) == (FINGERPRINT, ["vllm"])
        server.engine.behaviour.is_dead = True
        assert (await server.client.get("/v1/status")).json()["phase"] == "restarting"
        error_of(await run(server), 503, "engine_restarting")


async def test_the_head_comes_to_the_engine_as_it_was_sent(serve: Serve) -> None:
    async with serve() as server:
        content = message(streams=True, wanted=["x"], accepts=["zstd"], python="3.9.1", client="0.0.1")
        answered(await run(server, content))
        (head,) = server.engine.fake_traces.heads
        assert head == TraceRequest.from_bytes(content).head


async def test_fields_that_a_newer_client_sends_are_ignored(serve: Serve) -> None:
    async with serve() as server:
        head = json.loads(message()[12:-6]) | {"surprise": {"a": 1}}
        raw = json.dumps(head).encode()
        content = b"NNSR" + struct.pack("<BxxxI", 1, len(raw)) + raw + b"blocks"
        assert answered(await run(server, content))[-1].kind is FrameKind.RESULT
