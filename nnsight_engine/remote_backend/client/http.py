"""Trace requests over HTTP, with one connection pool per process; responses are read as they arrive.

Retried are requests that never reached the server or that it rejected as not ready (503 with a reason),
reads, and job submissions, which carry an idempotency key; never a trace that may have started. Downloads
resume where they stopped.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

import httpx

from api_schemas.jobs import JobStatus
from nnsight_engine.core.config import CONFIG
from nnsight_engine.remote_backend.client.connection import Retry, normalized, without_frames
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameReader
from nnsight_engine.remote_backend.messages import MEDIA_TYPE, TraceRequest
from nnsight_engine.serialization import DecodeError

Progress = Callable[[str, int, int], None]
"""Called with ``"upload"`` or ``"download"``, the number of bytes transferred, and the total number of
bytes."""


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


def frames_of(chunks: Iterator[bytes], progress: Progress | None) -> Iterator[Frame]:
    reader = FrameReader(MAX_FRAME_BYTES)
    for chunk in chunks:
        yield from reader.feed(chunk)
        _report(reader, progress)


class Download:
    """A frame stream that is downloaded over several connections."""

    def __init__(self) -> None:
        self.restart("")

    def restart(self, tag: str) -> None:
        """Start again at the first byte of the version with this entity tag."""
        self._tag = tag
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._frames: list[Frame] = []
        self.num_bytes = 0

    def headers(self) -> dict[str, str]:
        """Return the headers of a request for the rest of the version that was begun."""
        if not self.num_bytes:
            return {}
        return {"range": f"bytes={self.num_bytes}-", "if-range": self._tag}

    def take(self, chunk: bytes, progress: Progress | None) -> None:
        self.num_bytes += len(chunk)
        self._frames.extend(self._reader.feed(chunk))
        _report(self._reader, progress)

    def frames(self) -> list[Frame]:
        """Return the frames of the complete stream; raise a ``DecodeError`` if it ends within a frame."""
        if not self._reader.is_between:
            raise DecodeError("the job's result ends within a frame")
        return self._frames


def _report(reader: FrameReader, progress: Progress | None) -> None:
    pending = reader.pending
    if progress is not None and pending is not None and pending[1] > _SHOWN_BYTES:
        progress("download", *pending)


_CONNECT_S: Final = 10.0
_READ_S: Final = 3600.0
"""Read timeout between two frames: a block may compute for a long time without producing any."""
_CHUNK_BYTES: Final = 2**20


class HttpTransport:
    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        """Store the address, or raise a ``ValueError``; connections are opened when first needed."""
        self.url = normalized(url if url is not None else CONFIG.API.HOST)
        self._key = CONFIG.API.KEY if key is None else key

    @property
    def name(self) -> str:
        return self.url

    # Traces.

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        response = self._with_retries(lambda: self._post("/v1/traces", request, progress, stream=True))
        try:
            yield from frames_of(response.iter_raw(), progress)
        except httpx.TransportError as error:
            raise self._connection_broke(error) from error
        finally:
            response.close()

    async def stream(self, request: TraceRequest) -> AsyncIterator[Frame]:
        reader, content = FrameReader(MAX_FRAME_BYTES), request.to_bytes()
        async with httpx.AsyncClient(timeout=_timeout(), headers=self.headers()) as client:

            async def send() -> httpx.Response:
                sent = client.build_request(
                    "POST", self.url + "/v1/traces", content=content, headers={"content-type": MEDIA_TYPE}
                )
                response = await client.send(sent, stream=True)
                if response.status_code >= httpx.codes.BAD_REQUEST:
                    async with contextlib.aclosing(response):
                        await response.aread()
                        raise RemoteError.from_response(response)
                return response

            async with contextlib.aclosing(await self._with_retries_async(send)) as response:
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
        key = {"Idempotency-Key": uuid.uuid4().hex}
        answer = self._with_retries(
            lambda: self._post("/v1/jobs", request, progress, headers=key), is_repeatable=True
        )
        return _object(answer)

    def job(self, job_id: str) -> dict[str, Any]:
        return self.get_json(f"/v1/jobs/{job_id}")

    def cancel(self, job_id: str) -> dict[str, Any]:
        path = f"{self.url}/v1/jobs/{job_id}/cancel"
        return _object(self._with_retries(lambda: self._send("POST", path), is_repeatable=True))

    def result(self, job_id: str, progress: Progress | None = None) -> list[Frame]:
        """Return the frames of a job's result; an interrupted download resumes where it stopped."""
        download, tries = Download(), Retry(self.url)
        while True:
            num_bytes = download.num_bytes
            try:
                self._fetch(job_id, download, progress)
                break
            except (httpx.TransportError, RemoteError) as error:
                if download.num_bytes > num_bytes:
                    tries.progressed()
                tries.wait(error)
        return download.frames()

    def _fetch(self, job_id: str, download: Download, progress: Progress | None) -> None:
        path = f"{self.url}/v1/jobs/{job_id}/result"
        response = self._send("GET", path, headers=download.headers(), stream=True)
        with contextlib.closing(response):
            if response.status_code != httpx.codes.PARTIAL_CONTENT:
                download.restart(response.headers.get("etag", ""))
            for chunk in response.iter_raw():
                download.take(chunk, progress)

    def events(self, job_id: str, after: int = 0, end: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield a job's events after number ``after``; ``TimeoutError`` at the monotonic time ``end``."""
        return self.followed(lambda last: self._events(job_id, last, end), job_id, after, end)

    def followed(
        self, connect: Callable[[int], Iterator[dict[str, Any]]], job_id: str, after: int, end: float | None
    ) -> Iterator[dict[str, Any]]:
        """Yield a job's events with ``connect``, reconnecting as often as necessary; see ``events``."""
        last, tries = after, Retry(self.url)
        while True:
            try:
                for event in connect(last):
                    last = event["id"]
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
        """Return whether a job has ended; not retried, since ``followed`` retries until the deadline."""
        answer = _object(self._send("GET", f"{self.url}/v1/jobs/{job_id}", read_s=_read_timeout(end)))
        return JobStatus(answer["status"]).is_final

    def _events(self, job_id: str, after: int, end: float | None) -> Iterator[dict[str, Any]]:
        path = f"{self.url}/v1/jobs/{job_id}/events?after={after}"
        # The server sends heartbeats, so only the caller's deadline can be shorter.
        read_s = _read_timeout(end)
        response = self._send(
            "GET", path, headers={"accept": "text/event-stream"}, stream=True, read_s=read_s
        )
        try:
            for line in response.iter_lines():
                if end is not None and time.monotonic() >= end:
                    raise httpx.ReadTimeout("the caller's time is up")
                if line.startswith("data:"):
                    event: dict[str, Any] = json.loads(line.removeprefix("data:"))
                    yield event
        finally:
            response.close()

    # Information.

    def outline(self) -> dict[str, Any]:
        return self.get_json("/v1/traces/outline")

    def get_json(self, path: str) -> dict[str, Any]:
        return _object(self._with_retries(lambda: self._send("GET", self.url + path), is_repeatable=True))

    # Requests.

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def _post(
        self,
        path: str,
        request: TraceRequest,
        progress: Progress | None,
        *,
        headers: dict[str, str] | None = None,
        stream: bool = False,
    ) -> httpx.Response:
        chunks = request.chunks()
        num_bytes = sum(map(len, chunks))
        sent = {"content-type": MEDIA_TYPE, "content-length": str(num_bytes), **(headers or {})}
        content: Any = b"".join(chunks)
        if num_bytes > _CHUNK_BYTES:
            content = _pieces(content, progress)
        return self._send("POST", self.url + path, headers=sent, content=content, stream=stream)

    def _send(
        self,
        method: str,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        content: Any = None,
        stream: bool = False,
        read_s: float = _READ_S,
    ) -> httpx.Response:
        client = _client(os.getpid())
        sent = {**self.headers(), **(headers or {})}
        request = client.build_request(method, url, headers=sent, content=content, timeout=_timeout(read_s))
        response = client.send(request, stream=stream)
        if response.status_code >= httpx.codes.BAD_REQUEST:
            with contextlib.closing(response):
                response.read()
                raise RemoteError.from_response(response)
        return response

    def _with_retries(
        self, send: Callable[[], httpx.Response], *, is_repeatable: bool = False
    ) -> httpx.Response:
        tries = Retry(self.url, is_repeatable=is_repeatable)
        while True:
            try:
                return send()
            except (httpx.TransportError, RemoteError) as error:
                tries.wait(error)

    async def _with_retries_async(self, send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """Send a request that must not run twice; retry like ``_with_retries``."""
        tries = Retry(self.url, is_repeatable=False)
        while True:
            try:
                return await send()
            except (httpx.TransportError, RemoteError) as error:
                await asyncio.sleep(tries.pause_s(error))


@functools.cache
def _client(pid: int) -> httpx.Client:
    """Return the connection pool of this process; a forked process needs its own."""
    del pid
    return httpx.Client(timeout=_timeout(), limits=httpx.Limits(max_keepalive_connections=32))


def _timeout(read_s: float = _READ_S) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=min(_CONNECT_S, read_s))


def seconds_until(end: float) -> float:
    """Return the seconds until a deadline on the monotonic clock, as a timeout: positive."""
    return max(end - time.monotonic(), 0.001)


def _read_timeout(end: float | None) -> float:
    return _READ_S if end is None else seconds_until(end)


def _pieces(content: bytes, progress: Progress | None) -> Iterator[bytes]:
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]
        if progress is not None:
            progress("upload", min(start + _CHUNK_BYTES, len(content)), len(content))


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
