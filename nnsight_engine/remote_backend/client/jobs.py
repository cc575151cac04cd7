"""Following a job over its WebSocket, where the server can ask the client to run parts of the job's blocks.

Events are JSON texts, calls and responses frames in pieces. A broken connection is replaced by a new one,
which continues with the events after the last one received.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from websockets.exceptions import ConnectionClosedOK, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from api_schemas.jobs import JobStatus
from nnsight_engine.remote_backend.client.display import Display
from nnsight_engine.remote_backend.client.http import MAX_FRAME_BYTES, HttpTransport, seconds_until
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameReader, called, calling, tier_of

Run = Callable[[memoryview], bytes]
"""Runs a part of a block as requested by a message, and returns the response message."""

_OPEN_S: Final = 10.0


def followed(
    http: HttpTransport, run: Run, job_id: str, after: int = 0, end: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a job, and run the parts that its server requests; see ``HttpTransport.events``."""
    return http.followed(lambda last: _connection(http, run, job_id, last, end), job_id, after, end)


def _connection(
    http: HttpTransport, run: Run, job_id: str, after: int, end: float | None
) -> Iterator[dict[str, Any]]:
    """Yield events until the connection ends; raise a ``RemoteError`` if it is refused or broke."""
    try:
        with _connected(http, job_id, after, end) as socket:
            yield from _events(socket, run, end)
    except ConnectionClosedOK:
        return
    except InvalidStatus as error:
        raise _refusal(error) from error
    except (WebSocketException, OSError) as error:
        raise RemoteConnectionError(
            f"the WebSocket of job {job_id} at {http.url} cannot be reached, or broke off: {error}"
        ) from error


def _connected(http: HttpTransport, job_id: str, after: int, end: float | None) -> ClientConnection:
    address = "ws" + http.url.removeprefix("http")
    return connect(
        f"{address}/v1/jobs/{job_id}/events?after={after}&local=true",
        additional_headers=http.headers(),
        compression=None,
        max_size=None,
        open_timeout=_OPEN_S if end is None else min(_OPEN_S, seconds_until(end)),
    )


def _events(socket: ClientConnection, run: Run, end: float | None) -> Iterator[dict[str, Any]]:
    reader = FrameReader(MAX_FRAME_BYTES)
    while True:
        message = socket.recv(timeout=None if end is None else seconds_until(end))
        if isinstance(message, str):
            event = json.loads(message)
            if event.get("type") == "event":
                yield event
            continue
        for frame in reader.feed(message):
            _answer(socket, frame, run)


def _answer(socket: ClientConnection, frame: Frame, run: Run) -> None:
    number, data = called(frame)
    for piece in calling(number, run(data)).pieces():
        socket.send(piece)


def _refusal(error: InvalidStatus) -> RemoteError:
    status, body = error.response.status_code, error.response.body
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return RemoteError.from_body(json.loads(body or b""), status=status)
    return RemoteError(f"the server refused a job's WebSocket with {status}", status=status)


Read = Callable[[Sequence[Frame]], dict[str, Any]]
_FIRST_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0


class RemoteJob:
    """One job on a server.

    Args:
        read: Returns the saved values by name from the frames of a result; raises errors of the blocks.
        run: Runs parts of its blocks in this process, if it has such parts.

    Attributes:
        id: The job's id on the server.
        status: The status when it was last queried.
        engine: The engine that runs it, once known.
        tier: How vLLM ran it, once its result has been read; see ``tier_of``.
    """

    def __init__(
        self,
        http: HttpTransport,
        job_id: str,
        read: Read,
        status: JobStatus | None = None,
        run: Run | None = None,
    ) -> None:
        self.id = job_id
        self.status = status
        self.engine: str | None = None
        self.tier: str | None = None
        self._http = http
        self._read = read
        self._run = run
        self._result: dict[str, Any] | None = None

    def poll(self) -> dict[str, Any] | None:
        """Return the result, ``{"id": job_id, name: value, ...}``, or None while there is none.

        Raises:
            RemoteError: The job ended without a result.
            BaseException: The error that a block raised.
        """
        if self._result is None:
            job = self._http.job(self.id)
            self.status, self.engine = JobStatus(job["status"]), job.get("engine")
            if not self.status.is_final:
                return None
            if not job.get("result_bytes"):
                raise _ended(job)
            with Display() as display:
                frames = self._http.result(self.id, display.progress)
            self.tier = tier_of(frames)
            self._result = {"id": self.id, **self._read(frames)}
        return self._result

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Block until the job ends, display its progress, and return its result; see ``poll``.

        Raises:
            TimeoutError: The job takes longer; it continues to run.
        """
        with Display() as display:
            for event in self.events(timeout_s=timeout_s):
                display.event(event)
        result = self.poll()
        if result is None:  # the server was stopped, which ended the event stream
            raise RemoteError(f"job {self.id} is {self.status} still, and its events have ended")
        return result

    def events(self, after: int = 0, timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the job's events as they occur, up to its end.

        Args:
            after: Number of the last event to skip.
            timeout_s: How long to wait for the job's end.

        Raises:
            TimeoutError: The job takes longer; it continues to run.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        events = self._http.events if self._run is None else partial(followed, self._http, self._run)
        for event in events(self.id, after, end):
            if event["status"] != JobStatus.LOG:
                self.status = JobStatus(event["status"])
            self.engine = event.get("engine") or self.engine
            yield event

    def cancel(self) -> None:
        """Cancel the job."""
        self.status = JobStatus(self._http.cancel(self.id)["status"])

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait for the job's end without blocking the event loop, and return its result; see ``poll``."""
        return self._awaited().__await__()

    async def _awaited(self) -> dict[str, Any]:
        if self._run is not None:
            return await asyncio.to_thread(self.wait)
        pause = _FIRST_POLL_S
        while True:
            result = await asyncio.to_thread(self.poll)
            if result is not None:
                return result
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _MAX_POLL_S)


def _ended(job: Mapping[str, Any]) -> RemoteError:
    error = job.get("error") or {}
    message = error.get("message") or f"job {job['id']} ended as {job['status']} and left no result"
    return RemoteError(str(message), code=error.get("code"))
