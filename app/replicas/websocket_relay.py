"""Forwards a client's WebSocket to a replica, or to all of them if the replica that runs a job is unknown.

With ``local=true``, any replica may call the client, another one after a failure. The first one sends events,
each may send calls, and all receive the answers, which only the calling replica waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, urlsplit

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from app.listen_socket import detect_lost_peer
from app.replicas.protocol import ReplicaAddress
from app.replicas.relay import REPLICA_HEADER, NotAcceptedError, forwarded_headers, is_refusal

_CONNECT_TIMEOUT_S: Final = 10.0
_OTHERS_CONNECT_TIMEOUT_S: Final = 2.0
"""Time limit for connecting to the other replicas; the client waits meanwhile."""
_GOING_AWAY, _TRY_AGAIN_LATER = 1001, 1013
_NO_CODE: Final = {1005, 1006, 1015}
"""Close codes that mean that no code was received."""
_HANDSHAKE_HEADERS: Final = {"connection", "host", "upgrade", "x-forwarded-for", "x-forwarded-proto"}
_DROPPED_HEADERS: Final = {"connection", "content-length", "date", "server", "transfer-encoding"}


async def relay_socket(
    websocket: WebSocket, path: str, address: ReplicaAddress, others: Sequence[ReplicaAddress]
) -> None:
    """Forward a WebSocket, not accepted yet, until either side closes it; NotAcceptedError if refused."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            first = await stack.enter_async_context(_connection(websocket, path, address))
        except InvalidStatus as error:
            denial = _denial(error)
            if is_refusal(denial.status_code, bytes(denial.body)):
                raise NotAcceptedError(denial) from error
            await reject(websocket, denial)
            return
        except (OSError, TimeoutError, WebSocketException) as error:
            raise NotAcceptedError from error
        detect_lost_peer(first.transport.get_extra_info("socket"))

        async def join(one: ReplicaAddress) -> ClientConnection | None:
            try:
                connection = _connection(websocket, path, one, timeout_s=_OTHERS_CONNECT_TIMEOUT_S)
                joined = await stack.enter_async_context(connection)
            except (OSError, TimeoutError, WebSocketException):
                return None
            detect_lost_peer(joined.transport.get_extra_info("socket"))
            return joined

        further = [one for one in await asyncio.gather(*map(join, others)) if one is not None]
        await websocket.accept(first.subprotocol, [(REPLICA_HEADER.encode(), address.name.encode())])
        code = await _pump(websocket, first, further)
        if code is not None:
            # The client may have disconnected.
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await websocket.close(_GOING_AWAY if code in _NO_CODE else code)


async def reject(websocket: WebSocket, response: Response) -> None:
    """Reject a WebSocket with a response, or without one if Ray Serve's server cannot send it."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:
        await websocket.close(_TRY_AGAIN_LATER)


def _connection(
    websocket: WebSocket, path: str, address: ReplicaAddress, *, timeout_s: float = _CONNECT_TIMEOUT_S
) -> connect:
    # The replica checks the host name that the client used.
    host = websocket.headers.get("host", "localhost")
    query = websocket.url.query
    target = urlsplit(address.url)
    dropped = (*_HANDSHAKE_HEADERS, REPLICA_HEADER)
    headers = [
        (name, value)
        for name, value in websocket.headers.items()
        if name not in dropped and not name.startswith("sec-websocket-")
    ]
    headers += forwarded_headers(websocket).items()
    return connect(
        f"ws://{host}{quote(path, safe='/:@')}{'?' if query else ''}{query}",
        host=target.hostname,
        port=target.port,
        additional_headers=headers,
        user_agent_header=None,
        compression=None,
        max_size=None,  # limited by the replica
        ping_interval=None,  # the client and the replica ping each other; TCP keep-alive detects a lost host
        open_timeout=timeout_s,
        proxy=None,
    )


async def _pump(
    websocket: WebSocket, first: ClientConnection, further: Sequence[ClientConnection]
) -> int | None:
    """Forward messages; return the replica's close code, or None if the client closed."""
    listening = asyncio.create_task(_forward_to_replicas(websocket, first, further))
    sending = asyncio.create_task(_forward_to_client(websocket, first))
    receiving_others = [asyncio.create_task(_send_calls(websocket, one)) for one in further]
    try:
        done, _ = await asyncio.wait([listening, sending], return_when=asyncio.FIRST_COMPLETED)
        return sending.result() if sending in done and listening not in done else None
    except WebSocketDisconnect:
        return None  # raised by a send
    finally:
        for task in (listening, sending, *receiving_others):
            task.cancel()
        await asyncio.gather(listening, sending, *receiving_others, return_exceptions=True)


async def _forward_to_replicas(
    websocket: WebSocket, first: ClientConnection, further: Sequence[ClientConnection]
) -> None:
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        text, data = message.get("text"), message.get("bytes")
        targets = (first,) if data is None else (first, *further)
        for one in targets:
            with contextlib.suppress(ConnectionClosed):  # handled by its reader
                await one.send(text or "" if data is None else data)


async def _forward_to_client(websocket: WebSocket, source: ClientConnection) -> int:
    with contextlib.suppress(ConnectionClosed):
        async for message in source:
            if isinstance(message, str):
                await websocket.send_text(message)
            else:
                await websocket.send_bytes(message)
    return source.close_code or _GOING_AWAY


async def _send_calls(websocket: WebSocket, source: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        async for message in source:
            if isinstance(message, bytes):  # the first replica sends the job's events
                await websocket.send_bytes(message)


def _denial(error: InvalidStatus) -> Response:
    found = error.response
    headers = {
        name: value for name, value in found.headers.raw_items() if name.lower() not in _DROPPED_HEADERS
    }
    return Response(bytes(found.body or b""), found.status_code, headers)


__all__ = ["reject", "relay_socket"]
