"""Following a job over its WebSocket, where the server can ask the client to run parts of the job's blocks.

Events are JSON texts, calls and responses frames in pieces. A broken connection is replaced by a new one,
which continues with the events after the last one received.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from websockets.exceptions import ConnectionClosedOK, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from nnsight_engine.remote_backend.client.http import HttpTransport, seconds_until
from nnsight_engine.remote_backend.client.received_frames import MAX_FRAME_BYTES
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameReader, called, calling

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


__all__ = ["Run", "followed"]
