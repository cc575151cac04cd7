"""How a WebSocket that follows a job is closed, whoever ends it first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection

from api_schemas.jobs import JobEvent, JobStatus
from app.replicas import websocket_relay
from app.routes import job_events

EVENT = JobEvent(id=1, job="job", status=JobStatus.RUNNING, time=1.0)


class Socket:
    """A socket whose client says what it is told to; once it is gone, nothing may be sent."""

    def __init__(self, *messages: dict[str, Any], error: Exception | None = None) -> None:
        self.messages = list(messages)
        self.closed: list[int] = []
        self.is_gone = False
        self._error = error

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        message = self.messages.pop(0)
        self.is_gone = message["type"] == "websocket.disconnect"
        return message

    async def send_json(self, value: Any) -> None:
        await self.send_text("")

    async def send_text(self, text: str) -> None:
        del text
        if self._error is not None:
            raise self._error

    async def close(self, code: int) -> None:
        if self.is_gone:
            raise AssertionError("a socket is closed whose client has gone")
        if self._error is not None:
            raise self._error
        self.closed.append(code)


GONE = {"type": "websocket.disconnect"}
ODD = {"type": "websocket.receive", "text": "odd"}


async def follow(socket: Socket, *events: JobEvent, is_final: bool = True) -> None:
    async def told() -> AsyncGenerator[JobEvent, None]:
        for event in events:
            yield event

    async def get(_job: str, _owner: str) -> Any:
        return SimpleNamespace(status=SimpleNamespace(is_final=is_final))

    context = SimpleNamespace(
        jobs=SimpleNamespace(get=get, local_calls=None),
        receiving=SimpleNamespace(intake=lambda _tenant: None),
        settings=SimpleNamespace(max_trace_request_bytes=1),
    )
    caller = SimpleNamespace(tenant="acme")
    await job_events._follow(  # noqa: SLF001 - the route around it needs a server and a job
        cast("WebSocket", socket), "job", told(), cast("Any", context), cast("Any", caller), local=False
    )


@pytest.mark.parametrize(
    ("messages", "is_final", "codes"),
    [([], True, [1000]), ([], False, [1001]), ([GONE], True, []), ([GONE], False, []), ([ODD], True, [1003])],
)
async def test_a_client_that_leaves_as_the_job_ends_is_sent_nothing_more(
    messages: list[dict[str, Any]], is_final: bool, codes: list[int]
) -> None:
    socket = Socket(*messages)
    await follow(socket, is_final=is_final)  # both sides end in their first step
    assert socket.closed == codes


@pytest.mark.parametrize("events", [[], [EVENT]])
@pytest.mark.parametrize("error", [WebSocketDisconnect(1006), RuntimeError("after a close")])
async def test_a_client_whose_loss_is_found_in_sending_is_no_fault(
    events: list[JobEvent], error: Exception
) -> None:
    if events and isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError):  # nobody has left: it is ours
            await follow(Socket(error=error), *events)
        return
    await follow(Socket(error=error), *events)


@pytest.mark.parametrize(
    ("messages", "error", "code"),
    [([], None, 1000), ([GONE], None, None), ([], WebSocketDisconnect(1006), None)],
)
async def test_a_front_closes_no_socket_whose_client_has_gone(
    messages: list[dict[str, Any]], error: Exception | None, code: int | None
) -> None:
    class Replica:
        close_code = 1000

        async def __aiter__(self) -> AsyncGenerator[str, None]:
            yield "an event"

    pumped = websocket_relay._pump(  # noqa: SLF001 - the route around it needs two servers
        cast("WebSocket", Socket(*messages, error=error)), cast("ClientConnection", Replica()), []
    )
    assert await pumped == code
