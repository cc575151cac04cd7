"""The client's side of HTTP against a server that misbehaves in every way that servers do."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from nnsight_engine.core.config import CONFIG
from nnsight_engine.remote_backend.client.connection import normalized
from nnsight_engine.remote_backend.client.http import HttpTransport
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from tests.waiting import wait_for

RESULT = Frame(FrameKind.RESULT, bytes(5_000_000))
REQUEST = TraceRequest(TraceHead(model="m", dialect="vllm"), [b"blocks"])


def error(code: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": f"it is {code}", "code": code, "param": "x"}}, status)


class Server:
    """Answers as it is told; counts what it is asked."""

    def __init__(self, port: int = 0) -> None:
        self.asked: list[tuple[str, str]] = []
        self.keys: list[str | None] = []
        self.failures = 0
        self.code = "starting"
        self.tag = '"one"'
        self.status = "COMPLETED"
        routes = [
            Route("/v1/traces", self.trace, methods=["POST"]),
            Route("/v1/jobs", self.submit, methods=["POST"]),
            Route("/v1/jobs/{id}", self.job),
            Route("/v1/jobs/{id}/result", self.result),
            Route("/v1/jobs/{id}/events", self.events),
            Route("/text", self.text),
        ]
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            self.port = sock.getsockname()[1]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="critical")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)

    def fails(self, request: Request) -> bool:
        self.asked.append((request.method, request.headers.get("authorization", "")))
        self.failures -= 1
        return self.failures >= 0

    async def trace(self, request: Request) -> Response:
        if self.fails(request):
            return error(self.code, 429 if self.code == "queue_full" else 503)
        assert TraceRequest.from_bytes(await request.body()).head.model == "m"

        async def frames() -> AsyncIterator[bytes]:
            frame = json_frame(FrameKind.EVENT, {"status": "RUNNING"})
            yield frame.head() + bytes(frame.data)
            if self.code == "cut":
                yield RESULT.head() + b"abc"
                raise ConnectionResetError
            yield RESULT.head() + bytes(RESULT.data)

        return StreamingResponse(frames())

    async def submit(self, request: Request) -> Response:
        self.keys.append(request.headers.get("idempotency-key"))
        if self.fails(request):
            await self.drop(request)
        return JSONResponse({"id": "j", "status": "QUEUED"}, 202)

    async def job(self, request: Request) -> Response:
        return JSONResponse({"id": "j", "status": self.status})

    async def drop(self, request: Request) -> None:
        raise ConnectionResetError

    async def result(self, request: Request) -> Response:
        data = RESULT.head() + bytes(RESULT.data)
        start = int(request.headers.get("range", "bytes=0-")[6:-1])
        fails = self.fails(request)

        async def rest() -> AsyncIterator[bytes]:
            yield data[start : start + 2_000_000]
            await asyncio.sleep(0.05)
            if fails:
                raise ConnectionResetError
            yield data[start + 2_000_000 :]

        headers = {"content-length": str(len(data) - start), "etag": self.tag}
        if start and request.headers["if-range"] != self.tag:
            start = 0  # what was there before is gone
            headers["content-length"] = str(len(data))
        return StreamingResponse(rest(), 206 if start else 200, headers=headers)

    async def events(self, request: Request) -> Response:
        after = int(request.query_params["after"])
        fails = self.fails(request)

        async def stream() -> AsyncIterator[str]:
            for number in range(after + 1, 5):
                status = "COMPLETED" if number == 4 else "LOG"
                yield f"id: {number}\ndata: {json.dumps({'id': number, 'status': status})}\n\n"
                if fails:
                    raise ConnectionResetError

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def text(self, request: Request) -> Response:
        return PlainTextResponse("hello", 502 if self.fails(request) else 200)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.server.should_exit = True
    found.thread.join()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnsight_engine.remote_backend.client.connection._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("nnsight_engine.remote_backend.client.connection._CONTACT_S", 0.1)
    monkeypatch.setattr("nnsight_engine.remote_backend.client.connection._PATIENCE_S", 0.5)


def transport(server: Server) -> HttpTransport:
    return HttpTransport(f"127.0.0.1:{server.port}", "secret")


def test_frames_come_and_the_key_is_sent(server: Server) -> None:
    told = []
    frames = list(transport(server).run(REQUEST, lambda *what: told.append(what)))
    assert [frame.kind for frame in frames] == [FrameKind.EVENT, FrameKind.RESULT]
    assert bytes(frames[1].data) == RESULT.data
    assert server.asked == [("POST", "Bearer secret")]
    assert {what[0] for what in told} == {"download"}


async def streamed(url: HttpTransport) -> list[Frame]:
    return [frame async for frame in url.stream(REQUEST)]


Run = Callable[[HttpTransport], list[Frame]]
RUNS: list[Run] = [lambda url: list(url.run(REQUEST)), lambda url: asyncio.run(streamed(url))]
WAYS = pytest.mark.parametrize("run", RUNS, ids=["whole", "streamed"])


@WAYS
@pytest.mark.parametrize("code", ["starting", "queue_full"])
def test_a_server_that_starts_is_waited_for(server: Server, run: Run, code: str) -> None:
    server.failures, server.code = 3, code
    assert len(run(transport(server))) == 2
    assert len(server.asked) == 4


@WAYS
def test_a_server_that_is_not_there_yet_is_tried_to_be_reached(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnsight_engine.remote_backend.client.connection._CONTACT_S", 30)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    started: list[Server] = []
    starting = threading.Timer(0.1, lambda: started.append(Server(port)))
    starting.start()
    try:
        assert len(run(HttpTransport(f"127.0.0.1:{port}"))) == 2
    finally:
        starting.join()
        started[0].server.should_exit = True
        started[0].thread.join()


@WAYS
@pytest.mark.parametrize(("code", "is_repeated"), [("starting", True), ("invalid_trace", False)])
def test_refusals_are_typed_and_repeated_only_where_that_helps(
    server: Server, run: Run, code: str, is_repeated: bool
) -> None:
    server.failures, server.code = 100, code
    with pytest.raises(RemoteError, match=f"it is {code}") as caught:
        run(transport(server))
    assert (caught.value.code, caught.value.status, caught.value.param) == (code, 503, "x")
    assert (len(server.asked) > 3) is is_repeated
    assert is_repeated or len(server.asked) == 1


@WAYS
def test_a_trace_that_has_begun_is_not_repeated(server: Server, run: Run) -> None:
    server.code = "cut"
    with pytest.raises(RemoteConnectionError, match="broke before the trace's end"):
        run(transport(server))
    assert len(server.asked) == 1


def test_an_error_of_a_submission_is_not_repeated_and_each_has_a_key(server: Server) -> None:
    server.failures = 2
    with pytest.raises(RemoteError):
        transport(server).submit(REQUEST)
    server.failures = 0
    assert transport(server).submit(REQUEST)["id"] == "j"
    assert all(key and len(key) == 32 for key in server.keys)


def test_a_download_that_breaks_goes_on_where_it_was(server: Server) -> None:
    server.failures = 2
    (frame,) = transport(server).result("j")
    assert bytes(frame.data) == RESULT.data
    assert len(server.asked) == 3


def test_a_download_begins_anew_if_the_result_is_another_by_now(server: Server) -> None:
    server.failures = 1
    seen = server.tag

    def change(*_: object) -> None:
        server.tag = '"two"'

    (frame,) = transport(server).result("j", change)
    assert bytes(frame.data) == RESULT.data
    assert server.tag != seen


def test_events_go_on_after_the_last_one_seen(server: Server) -> None:
    server.failures = 2
    assert [event["id"] for event in transport(server).events("j")] == [1, 2, 3, 4]
    assert len(server.asked) == 3


def test_the_end_of_a_stream_is_not_the_end_of_a_job(server: Server) -> None:
    server.status = "RUNNING"  # again, after the last event that there is
    seen = []
    with pytest.raises(RemoteConnectionError, match="before the job did"):
        for event in transport(server).events("j"):
            seen.append(event["id"])  # noqa: PERF401 - what came before the error counts
    assert seen == [1, 2, 3, 4]
    assert len(server.asked) > 3


def test_something_else_at_the_address_is_recognised(server: Server) -> None:
    with pytest.raises(RemoteError, match="no JSON object; is it an NNsight Engine"):
        transport(server).get_json("/text")
    server.failures = 100
    with pytest.raises(RemoteError, match="answered 502: hello"):
        transport(server).get_json("/text")


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(
        RemoteConnectionError, match=r"http://127\.0\.0\.1:1 cannot be reached.*CONFIG\.API\.HOST"
    ) as caught:
        list(HttpTransport("127.0.0.1:1").run(REQUEST))
    shown = "".join(traceback.format_exception(caught.value))
    assert "httpx.ConnectError: [Errno 111]" in shown  # the cause, without its frames
    assert f"{os.sep}httpx{os.sep}" not in shown
    assert f"{os.sep}httpcore{os.sep}" not in shown


def test_addresses_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    assert normalized("localhost:8000/v1/") == "http://localhost:8000"
    assert normalized("https://host/base/") == "https://host/base"
    for wrong in ("ftp://host", "http://", "http://[::1"):
        with pytest.raises(ValueError, match="address"):
            normalized(wrong)
    monkeypatch.setattr(CONFIG.API, "HOST", "somewhere:9")
    assert HttpTransport().url == "http://somewhere:9"


def test_no_pause_and_no_status_request_outlasts_the_callers_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_FIRST_PAUSE_S", "_MAX_PAUSE_S", "_PATIENCE_S"):  # longer than a test may take
        monkeypatch.setattr(f"nnsight_engine.remote_backend.client.connection.{limit}", 10_000)
    server.status = "RUNNING"
    with pytest.raises(TimeoutError, match="goes on"):
        list(transport(server).events("j", after=4, end=time.monotonic() + 0.5))


@pytest.mark.parametrize(("code", "expected"), [(None, None), ("x", "x"), (429, "429")])
def test_an_errors_code_is_a_text_or_none(code: object, expected: str | None) -> None:
    assert RemoteError.from_body({"error": {"message": "m", "code": code, "param": code}}).code == expected
    assert RemoteError.from_body({"error": {"message": "m", "code": code, "param": code}}).param == expected
    with pytest.raises(TypeError):
        RemoteError.from_body({"error": {"message": None, "code": code}})
