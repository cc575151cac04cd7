"""Trace requests over HTTP, with one connection pool per process; responses are read as they arrive.

Retried are requests that never reached the server or that it rejected as not ready (503 with a reason),
reads, and job submissions, which carry an idempotency key; never a trace that may have started. Downloads and
events resume where they stopped. Over a job's WebSocket, the server can ask the client to run parts of the
job's blocks: its events are JSON texts, calls and responses frames in pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, Protocol

import httpx
from websockets.exceptions import ConnectionClosedOK, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from api_schemas.jobs import JobStatus
from nnsight_engine.core.config import CONFIG
from nnsight_engine.remote_backend.client.connection import Retry, normalized, without_frames
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameReader, called, calling
from nnsight_engine.remote_backend.messages import MEDIA_TYPE, TraceRequest
from nnsight_engine.serialization import DecodeError

Progress = Callable[[str, int, int], None]
"""Called with ``"upload"`` or ``"download"``, the number of bytes transferred, and the total number of
bytes."""
RunPart = Callable[[memoryview], bytes]
"""Runs a part of a block as requested by a message, and returns the response message."""


class Transport(Protocol):
    """Sends traces to a server and returns its responses; HTTP is one implementation."""

    @property
    def name(self) -> str:
        """The server's name in error messages and logs."""

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        """Send a trace and yield the response's frames; ``RemoteError`` if refused or not reachable."""

    def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        """Send a trace, and yield the frames of the response as they arrive; see ``run``."""

    def outline(self) -> dict[str, Any]:
        """Return the server's description of its model, see ``GET /v1/traces/outline``."""


MAX_FRAME_BYTES: Final = 16 * 2**30
_SHOWN_BYTES: Final = 2**20
"""Smaller frames arrive too quickly for a progress bar."""
_CHUNK_BYTES: Final = 2**20
_CONNECT_S: Final = 10.0
_READ_S: Final = 3600.0
"""Read timeout between two frames: a block may compute for a long time without producing any."""


class HttpTransport:
    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        """Store the address, or raise a ``ValueError``; connections are opened when first needed."""
        self.name = self.url = normalized(url if url is not None else CONFIG.API.HOST)
        self._key = CONFIG.API.KEY if key is None else key

    # Traces.

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        """Send a trace and yield the response's frames; one that may have started is not sent again."""
        response = self._with_retries(lambda: self._post("/v1/traces", request, progress, stream=True))
        reader = FrameReader(MAX_FRAME_BYTES)
        try:
            for chunk in response.iter_raw():
                yield from reader.feed(chunk)
                _report(reader, progress)
        except httpx.TransportError as error:
            raise self._connection_broke(error) from error
        finally:
            response.close()

    async def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        """Send a trace and yield frames as they arrive; it is sent again until the server takes it."""
        reader, content = FrameReader(MAX_FRAME_BYTES), request.to_bytes()
        tries = Retry(self.url, is_repeatable=False)
        async with httpx.AsyncClient(timeout=_timeout(), headers=self._headers()) as client:
            sent = client.build_request(
                "POST", self.url + "/v1/traces", content=content, headers={"content-type": MEDIA_TYPE}
            )
            while True:
                try:
                    response = await client.send(sent, stream=True)
                    if response.status_code < httpx.codes.BAD_REQUEST:
                        break
                    async with contextlib.aclosing(response):
                        await response.aread()
                        raise RemoteError.from_response(response)
                except (httpx.TransportError, RemoteError) as error:
                    await asyncio.sleep(tries.pause_s(error))
            async with contextlib.aclosing(response):
                try:
                    async for chunk in response.aiter_raw():
                        for frame in reader.feed(chunk):
                            yield frame
                except httpx.TransportError as error:
                    raise self._connection_broke(error) from error

    def _connection_broke(self, error: httpx.TransportError) -> RemoteConnectionError:
        without_frames(error)
        return RemoteConnectionError(f"the connection to {self.url} broke before the trace's end: {error}")

    # Jobs.

    def submit(self, request: TraceRequest, progress: Progress | None = None) -> dict[str, Any]:
        """Send a trace as a job; its key lets the server recognize a repeated request."""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        answer = self._with_retries(
            lambda: self._post("/v1/jobs", request, progress, headers=key), is_repeatable=True
        )
        return _object(answer)

    def job(self, job_id: str) -> dict[str, Any]:
        return self.get_json(f"/v1/jobs/{job_id}")

    def cancel(self, job_id: str) -> dict[str, Any]:
        return self._json("POST", f"/v1/jobs/{job_id}/cancel")

    def result(self, job_id: str, progress: Progress | None = None) -> list[Frame]:
        """Return the frames of a job's result; an interrupted download resumes where it stopped.

        Raises:
            DecodeError: The result ends within a frame.
        """
        tries, tag, num_bytes = Retry(self.url), "", 0
        reader, frames = FrameReader(MAX_FRAME_BYTES), list[Frame]()
        while True:
            num_bytes_before = num_bytes
            headers = {"range": f"bytes={num_bytes}-", "if-range": tag} if num_bytes else {}
            try:
                response = self._send("GET", f"/v1/jobs/{job_id}/result", headers=headers, stream=True)
                with contextlib.closing(response):
                    if response.status_code != httpx.codes.PARTIAL_CONTENT:  # all of it, maybe a new version
                        tag, num_bytes = response.headers.get("etag", ""), 0
                        reader, frames = FrameReader(MAX_FRAME_BYTES), []
                    for chunk in response.iter_raw():
                        num_bytes += len(chunk)
                        frames.extend(reader.feed(chunk))
                        _report(reader, progress)
                break
            except (httpx.TransportError, RemoteError) as error:
                if num_bytes > num_bytes_before:
                    tries.progressed()
                tries.wait(error)
        if not reader.is_between:
            raise DecodeError("the job's result ends within a frame")
        return frames

    def events(
        self, job_id: str, after: int = 0, end: float | None = None, run: RunPart | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield a job's events after number ``after``, reconnecting as often as necessary.

        Args:
            end: The monotonic time of a ``TimeoutError``.
            run: Runs the parts of the job's blocks that its server requests.
        """
        last_number, tries = after, Retry(self.url)
        while True:
            try:
                connected = self._events if run is None else functools.partial(self._events_and_calls, run)
                for event in connected(job_id, last_number, end):
                    last_number = event["id"]
                    tries.progressed()
                    yield event
                # A stopped server ends the stream as the end of a job does, and the stream of a job that was
                # run again still contains the end of its earlier run. So the job's status decides.
                if self._is_final(job_id, end):
                    return
                raise httpx.RemoteProtocolError("the events ended before the job did")
            except (httpx.TransportError, RemoteError) as error:
                left_s = math.inf if end is None else end - time.monotonic()
                pause_s = tries.pause_s(error) if left_s > 0 else 0.0
                time.sleep(max(min(pause_s, left_s), 0.0))
                if pause_s >= left_s:
                    raise TimeoutError(f"job {job_id} is not done yet; it goes on") from error

    def _is_final(self, job_id: str, end: float | None) -> bool:
        """Return whether a job has ended; not retried, since ``events`` retries until the deadline."""
        answer = _object(self._send("GET", f"/v1/jobs/{job_id}", read_s=_seconds_until(end, _READ_S)))
        return JobStatus(answer["status"]).is_final

    def _events(self, job_id: str, after: int, end: float | None) -> Iterator[dict[str, Any]]:
        """Yield a job's events from one connection, of server-sent events, to its end."""
        response = self._send(
            "GET",
            f"/v1/jobs/{job_id}/events?after={after}",
            headers={"accept": "text/event-stream"},
            stream=True,
            read_s=_seconds_until(end, _READ_S),  # the server sends heartbeats
        )
        with contextlib.closing(response):
            for line in response.iter_lines():
                if end is not None and time.monotonic() >= end:
                    raise httpx.ReadTimeout("the caller's time is up")
                if line.startswith("data:"):
                    event: dict[str, Any] = json.loads(line.removeprefix("data:"))
                    yield event

    def _events_and_calls(
        self, run: RunPart, job_id: str, after: int, end: float | None
    ) -> Iterator[dict[str, Any]]:
        """Yield events until the WebSocket ends; raise a ``RemoteError`` if it is refused or broke."""
        try:
            with connect(
                f"ws{self.url.removeprefix('http')}/v1/jobs/{job_id}/events?after={after}&local=true",
                additional_headers=self._headers(),
                compression=None,
                max_size=None,
                open_timeout=min(_CONNECT_S, _seconds_until(end, _CONNECT_S)),
            ) as socket:
                yield from _received(socket, run, end)
        except ConnectionClosedOK:
            return
        except InvalidStatus as error:
            raise _refusal(error) from error
        except (WebSocketException, OSError) as error:
            raise RemoteConnectionError(
                f"the WebSocket of job {job_id} at {self.url} cannot be reached, or broke off: {error}"
            ) from error

    # Information.

    def outline(self) -> dict[str, Any]:
        return self.get_json("/v1/traces/outline")

    def get_json(self, path: str) -> dict[str, Any]:
        return self._json("GET", path)

    # Requests.

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def _json(self, method: str, path: str) -> dict[str, Any]:
        return _object(self._with_retries(lambda: self._send(method, path), is_repeatable=True))

    def _post(
        self,
        path: str,
        request: TraceRequest,
        progress: Progress | None,
        *,
        headers: dict[str, str] | None = None,
        stream: bool = False,
    ) -> httpx.Response:
        """Post a trace; a large one goes in chunks, whose progress is shown."""
        content = request.to_bytes()
        sent = {"content-type": MEDIA_TYPE, "content-length": str(len(content)), **(headers or {})}
        is_large = len(content) > _CHUNK_BYTES
        chunks = _chunks(content, progress) if is_large else content
        return self._send("POST", path, headers=sent, content=chunks, stream=stream)

    def _send(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        content: bytes | Iterator[bytes] | None = None,
        stream: bool = False,
        read_s: float = _READ_S,
    ) -> httpx.Response:
        """Send one request through the process's pool; raise RemoteError for an error status."""
        client = _client(os.getpid())
        request = client.build_request(
            method,
            self.url + path,
            headers={**self._headers(), **(headers or {})},
            content=content,
            timeout=_timeout(read_s),
        )
        response = client.send(request, stream=stream)
        if response.status_code >= httpx.codes.BAD_REQUEST:
            with contextlib.closing(response):
                response.read()
                raise RemoteError.from_response(response)
        return response

    def _with_retries(
        self, send: Callable[[], httpx.Response], *, is_repeatable: bool = False
    ) -> httpx.Response:
        """Return the first response; a request that may have been processed is repeated if it may be."""
        tries = Retry(self.url, is_repeatable=is_repeatable)
        while True:
            try:
                return send()
            except (httpx.TransportError, RemoteError) as error:
                tries.wait(error)


@functools.cache
def _client(pid: int) -> httpx.Client:
    """Return the connection pool of this process; a forked process needs its own."""
    del pid
    return httpx.Client(timeout=_timeout(), limits=httpx.Limits(max_keepalive_connections=32))


def _timeout(read_s: float = _READ_S) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=min(_CONNECT_S, read_s))


def _seconds_until(end: float | None, without_end: float) -> float:
    """Return the seconds until a deadline on the monotonic clock, as a timeout: positive."""
    return without_end if end is None else max(end - time.monotonic(), 0.001)


def _chunks(content: bytes, progress: Progress | None) -> Iterator[bytes]:
    """Yield a body in parts, reporting each once the next is asked for, when it has been sent."""
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]
        if progress is not None:
            progress("upload", min(start + _CHUNK_BYTES, len(content)), len(content))


def _report(reader: FrameReader, progress: Progress | None) -> None:
    """Report the download of the frame that is being read, if it is large."""
    pending = reader.pending
    if progress is not None and pending is not None and pending[1] > _SHOWN_BYTES:
        progress("download", *pending)


def _received(socket: ClientConnection, run: RunPart, end: float | None) -> Iterator[dict[str, Any]]:
    """Yield events from a job's WebSocket; answer the server's calls with what ``run`` returns."""
    reader = FrameReader(MAX_FRAME_BYTES)
    while True:
        message = socket.recv(timeout=None if end is None else _seconds_until(end, _READ_S))
        if isinstance(message, str):
            event = json.loads(message)
            if event.get("type") == "event":
                yield event
            continue
        for frame in reader.feed(message):
            number, data = called(frame)
            for piece in calling(number, run(data)).pieces():
                socket.send(piece)


def _refusal(error: InvalidStatus) -> RemoteError:
    status, body = error.response.status_code, error.response.body
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return RemoteError.from_body(json.loads(body or b""), status=status)
    return RemoteError(f"the server refused a job's WebSocket with {status}", status=status)


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RemoteError(
            f"{response.url} answered with something that is no JSON object; is it an NNsight Engine?",
            status=response.status_code,
        )
    return value
