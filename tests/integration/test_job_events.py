"""Jobs that are followed over sockets, and what clients send meanwhile: no gaps, bounds, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.components import Components
from app.limits.limit import Limit
from app.services.jobs.local_calls import LocalAnswers, LocalCalls
from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader, called, calling, head_of
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import ErrorCheck, Server
from tests.integration.scripted_traces import HEADERS, Jobs, ScriptedEngine, trace
from tests.integration.serving import Application
from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(60)


class Live(Jobs):
    """A listening server with a scripted engine, and who follows its jobs."""

    @property
    def context(self) -> Components:
        context: Components = self.server.context
        return context

    async def sse(self, job_id: str, after: int = 0, **headers: str) -> AsyncGenerator[dict[str, Any], None]:
        path = f"/v1/jobs/{job_id}/events?after={after}"
        async with self.client.stream("GET", path, headers=headers) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def socket(self, job_id: str, after: int = 0, *, local: bool = False) -> connect:
        address = f"ws://127.0.0.1:{self.client.base_url.port}"
        return connect(f"{address}/v1/jobs/{job_id}/events?after={after}&local={local}")

    async def ws(self, job_id: str, after: int = 0) -> AsyncGenerator[dict[str, Any], None]:
        async with self.socket(job_id, after) as socket:
            async for message in socket:
                event = json.loads(message)
                assert event.pop("type") == "event"
                yield event
            assert socket.close_code == 1000

    async def until_nobody_follows(self) -> None:
        await wait_for_async(lambda: not self.context.jobs.feed.followers)


@contextlib.asynccontextmanager
async def live(folder: Path, behaviour: FakeBehaviour | None = None, **settings: Any) -> AsyncIterator[Live]:
    scripted = ScriptedEngine()
    served = Application(folder, behaviour, traces={"vllm": scripted}, **{"drain_timeout_s": 0.1, **settings})
    async with served.listening() as client:
        yield Live(Server(served, client), scripted)


async def listed(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in events]


@pytest.mark.both_databases
async def test_events_are_replayed_from_every_point_and_then_live(tmp_path: Path, database_url: str):
    async with live(tmp_path, database_url=database_url) as server:
        job_id = await server.submit("hang")
        early = [
            asyncio.create_task(listed(follow(job_id, after)))
            for follow in (server.sse, server.ws)
            for after in range(8)
        ]
        followers = server.context.jobs.feed.followers
        await wait_for_async(lambda: len(followers.get(job_id, ())) == len(early))
        server.engine.released.set()
        told = [await task for task in early]
        everything = told[0]
        assert [event["id"] for event in everything] == [1, 2, 3, 4, 5]
        assert [event["status"] for event in everything] == [
            "RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED",
        ]  # fmt: skip
        assert {event["job"] for event in everything} == {job_id}
        for count, events in enumerate(told):
            assert events == everything[count % 8 :]
        for after in range(8):
            assert await listed(server.sse(job_id, after)) == everything[after:]
            assert await listed(server.ws(job_id, after)) == everything[after:]
            # What a browser saw last goes before where it once began.
            headers = {"Last-Event-ID": str(after)}
            assert await listed(server.sse(job_id, 1, **headers)) == everything[after:]


async def test_a_client_that_reconnects_misses_nothing(tmp_path: Path):
    async with live(tmp_path) as server:
        job_id = await server.submit("logs:3000")
        seen: list[int] = []
        is_over = False
        while not is_over:
            num_before = len(seen)
            async with contextlib.aclosing(server.sse(job_id, seen[-1] if seen else 0)) as events:
                async for event in events:
                    seen.append(event["id"])
                    is_over = event["status"] == "COMPLETED"
                    if len(seen) - num_before == 400:
                        break
        assert seen == list(range(1, 3006))
        await server.until_nobody_follows()


async def test_events_arrive_while_the_job_runs(tmp_path: Path):
    async with live(tmp_path) as server:
        job_id = await server.submit("hang")
        async with contextlib.aclosing(server.sse(job_id)) as events, server.socket(job_id) as socket:
            while (await anext(events))["status"] != "RUNNING":
                pass
            while json.loads(await socket.recv())["status"] != "RUNNING":
                pass
            await socket.send('{"type": "ping"}')
            assert json.loads(await socket.recv()) == {"type": "pong"}
            server.engine.released.set()
            assert (await anext(events))["status"] == "COMPLETED"
            assert json.loads(await socket.recv())["status"] == "COMPLETED"


async def test_followers_that_leave_leave_nothing_and_the_job_goes_on(tmp_path: Path):
    async with live(tmp_path) as server:
        job_id = await server.submit("hang")
        async with contextlib.aclosing(server.sse(job_id)) as events, server.socket(job_id) as socket:
            await anext(events)
            await socket.recv()
        await server.until_nobody_follows()
        server.engine.released.set()
        assert (await listed(server.sse(job_id)))[-1]["status"] == "COMPLETED"


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "ping",
        "{}",
        '{"type": "other"}',
        "[" * 100_000,
        '{"type": "ping", "a": ' + "[" * 100_000,
        b"\x00binary",
    ],
)
async def test_messages_that_mean_nothing_close_the_socket(tmp_path: Path, sent: str | bytes):
    async with live(tmp_path) as server:
        job_id = await server.submit("hang")
        async with server.socket(job_id) as socket:
            await socket.send(sent)
            with pytest.raises(ConnectionClosed):
                await until_closed(socket)
            assert socket.close_code == 1003
        server.engine.released.set()
        assert (await listed(server.ws(job_id)))[-1]["status"] == "COMPLETED"


async def until_closed(socket: ClientConnection) -> None:
    while True:
        await socket.recv()


async def test_sockets_to_nowhere_are_answered_like_requests(tmp_path: Path):
    async with live(tmp_path) as server:
        with pytest.raises(InvalidStatus) as caught:
            async with server.socket("nobody"):
                pass
        assert caught.value.response.status_code == 404
        assert json.loads(caught.value.response.body)["error"]["code"] == "job_not_found"
        with pytest.raises(InvalidStatus) as caught:
            async with server.socket("nobody", -1):
                pass
        assert 400 <= caught.value.response.status_code < 500
        for bad in ("-1", "x", str(2**31), str(10**30)):
            response = await server.client.get("/v1/jobs/nobody/events", params={"after": bad})
            assert response.status_code == 422


async def test_while_the_engine_starts_jobs_are_followed_and_no_other_socket_is_let_in(tmp_path: Path):
    behaviour = FakeBehaviour(is_starting=True)
    async with live(tmp_path, behaviour) as server:
        url = str(server.client.base_url).replace("http", "ws")
        with pytest.raises(InvalidStatus) as caught:
            async with connect(f"{url}/v1/elsewhere"):
                pass
        assert caught.value.response.status_code == 503
        assert json.loads(caught.value.response.body)["error"]["code"] == "starting"
        behaviour.is_starting = False
        job_id = await server.submit("ok")
        behaviour.is_starting = True
        assert (await listed(server.ws(job_id)))[-1]["status"] == "COMPLETED"


async def test_a_removed_job_sends_its_followers_home(tmp_path: Path):
    async with live(tmp_path) as server:
        job_id = await server.submit("hang")
        following = [asyncio.create_task(listed(server.sse(job_id))) for _ in range(2)]
        socket = server.socket(job_id)
        async with socket as connection:
            await connection.recv()
            assert (await server.client.delete(f"/v1/jobs/{job_id}")).status_code == 204
            with pytest.raises(ConnectionClosed):
                await until_closed(connection)
            assert connection.close_code == 1001
        for task in following:
            assert (await task)[0]["status"] == "RECEIVED"


@pytest.mark.both_databases
async def test_two_servers_share_jobs_and_run_each_once(tmp_path: Path, database_url: str):
    both: dict[str, Any] = {"max_running_jobs": 2, "database_url": database_url}
    async with live(tmp_path, **both) as first, live(tmp_path, **both) as second:
        hanging = await first.submit("hang")
        await wait_for_async(lambda: bool(first.engine.started + second.engine.started))
        ids = [await (first, second)[count % 2].submit("ok") for count in range(40)]
        # Whoever runs it, both tell of it.
        for job_id in ids:
            for server in (first, second):
                assert (await listed(server.sse(job_id)))[-1]["status"] == "COMPLETED"
        started = first.engine.started + second.engine.started
        assert sorted(started) == sorted([hanging, *ids])
        # A job is ended from either.
        other = second if hanging in first.engine.started else first
        assert (await other.client.post(f"/v1/jobs/{hanging}/cancel")).json()["status"] == "RUNNING"
        assert (await listed(other.ws(hanging)))[-1]["status"] == "CANCELLED"
        assert first.engine.num_running == second.engine.num_running == 0


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path):
    async with live(tmp_path) as server:
        whole = trace(payload=bytes(3_000_000))

        async def half() -> AsyncIterator[bytes]:
            yield whole[:2_000_000]
            await wait_for_async(received)
            raise ConnectionError

        def received() -> bool:
            held = server.context.received.used() == 2_000_000
            return held or any(path.stat().st_size for path in (tmp_path / "data/servers").glob("*/*"))

        for route in ("/v1/jobs", "/v1/traces"):
            with pytest.raises(ConnectionError):
                await server.client.post(route, content=half(), headers=HEADERS)
            await wait_for_async(lambda: not server.context.lifecycle.num_in_flight)
        await wait_for_async(lambda: server.context.received.used() == 0)
        assert [path.name for path in (tmp_path / "data/servers").glob("*/*")] == [".lock"]
        assert (await server.client.get("/v1/jobs")).json()["data"] == []


async def test_bodies_that_are_held_are_bounded_and_given_back(tmp_path: Path, error_of: ErrorCheck) -> None:
    async with live(tmp_path, max_received_bytes=100_000) as server:

        async def post(script: str) -> Any:
            content = trace(script, payload=bytes(60_000))
            return await server.client.post("/v1/traces", content=content, headers=HEADERS)

        running = asyncio.create_task(post("hang"))
        await wait_for_async(lambda: server.engine.num_running == 1)
        refused = await post("ok")
        assert "may have 100000 bytes of requests" in error_of(refused, 429, "rate_limit_exceeded")
        assert refused.headers["retry-after"]
        server.engine.released.set()
        assert (await running).status_code == 200
        assert (await post("ok")).status_code == 200
        await wait_for_async(lambda: server.context.received.used() == 0)


async def test_a_paused_upload_is_refused_at_once_when_the_server_ends(tmp_path: Path) -> None:
    async with live(tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.client.base_url.port)
        head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {HEADERS['content-type']}\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\nhalf".encode())
        await wait_for_async(lambda: server.context.received.used() > 0)
        draining = asyncio.create_task(server.context.lifecycle.drain(0.1))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)  # and not after upload_idle_timeout_s
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"draining"' in answer
        await asyncio.wait_for(draining, 20)
        writer.close()


async def call_of(socket: ClientConnection) -> tuple[int, bytes]:
    """Return the call that a socket brings next."""
    reader = FrameReader(2**20)
    while True:
        message = await socket.recv()
        if isinstance(message, bytes):
            for frame in reader.feed(message):
                number, data = called(frame)
                return number, bytes(data)


async def send(socket: ClientConnection, frame: Frame) -> None:
    for piece in frame.pieces():
        await socket.send(piece)


async def pong(socket: ClientConnection) -> None:
    """Wait until the server has read what was sent."""
    await socket.send('{"type": "ping"}')
    while "pong" not in str(await socket.recv()):
        pass


def asking(server: Live, job_id: str) -> asyncio.Task[bytes]:
    async def ask() -> bytes:
        async with server.context.jobs.calls.call(job_id, b"what?") as answer:
            # Until the engine has it, the answer is held.
            assert server.context.received.used() == len(answer)
            return bytes(answer)

    return asyncio.create_task(ask())


async def test_unawaited_answers_are_not_held(tmp_path: Path) -> None:
    async with live(tmp_path) as server:
        held = server.context.received
        job_id = await server.submit("hang")
        async with server.socket(job_id, local=True) as socket, server.socket(job_id, local=True) as other:
            # As large as they may be, of a call that is not there, and then whole ones.
            await other.send(head_of(FrameKind.LOCAL, 2**30))
            for _ in range(8):
                await other.send(bytes(2**20))
            await pong(other)
            assert held.used() == 0
            await send(socket, calling(99, bytes(3 * 2**20)))
            await send(socket, calling(99, b""))
            call = asking(server, job_id)
            number, question = await call_of(socket)
            assert question == b"what?"
            # One half of an answer, which ends with its call; then a whole one to the next call.
            late = list(calling(number, bytes(4 * 2**20)).pieces())
            for piece in late[:3]:
                await socket.send(piece)
            await pong(socket)
            assert held.used() == 2 * 2**20 - 8
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            for piece in late[3:]:
                await socket.send(piece)
            await pong(socket)
            assert held.used() == 0
            call = asking(server, job_id)
            number, _ = await call_of(socket)
            await send(socket, calling(number, b"that" * 2**19))
            assert await call == b"that" * 2**19
            assert held.used() == 0
            # Who leaves in the middle leaves nothing.
            call = asking(server, job_id)
            number, _ = await call_of(socket)
            await socket.send(b"".join(calling(number, bytes(2**20)).pieces())[:-1])
            await pong(socket)
            assert held.used() == 2**20 - 1
        await wait_for_async(lambda: held.used() == 0)
        call.cancel()
        server.engine.released.set()


async def test_an_answer_whose_call_ends_when_it_has_just_arrived_is_not_held() -> None:
    calls, held = LocalCalls(60), Limit("bytes", 1000)

    async def ask() -> None:
        async with calls.call("job", b"what?"):
            pass

    asked = asyncio.create_task(ask())
    await asyncio.sleep(0)
    answers = LocalAnswers(calls, "job", lambda: held.spend(""), 1000)
    answers.feed(b"".join(calling(calls.pending["job"].number, bytes(100)).pieces()))
    answers.close()
    assert held.used() == 100
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert held.used() == 0


async def test_answers_count_with_bodies_and_no_frame_of_another_kind_is_read(tmp_path: Path) -> None:
    async with live(tmp_path, max_received_bytes=2**20) as server:
        job_id = await server.submit("hang")
        call = asking(server, job_id)
        for frame, code in (
            (lambda number: calling(number, bytes(3 * 2**19)), 1013),
            (lambda _: Frame(FrameKind.EVENT, bytes(20)), 1003),
            (lambda _: Frame(FrameKind.LOCAL, bytes(4)), 1003),
        ):
            async with server.socket(job_id, local=True) as socket:
                number, _ = await call_of(socket)
                with pytest.raises(ConnectionClosed):
                    await send(socket, frame(number))
                    while True:
                        await socket.recv()
                assert socket.close_code == code
            await wait_for_async(lambda: server.context.received.used() == 0)
        call.cancel()
        server.engine.released.set()
