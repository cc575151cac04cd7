"""The HTTP client of the terminal commands: requests, answers, and streamed texts.

Requests are retried while the server starts. When the caller is cancelled, by Ctrl-C too, the connection is
closed, and the server aborts the request. Failed requests raise RemoteError. A server of a command's own
listens on a Unix socket for the length of the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, TypeVar

import httpx

from app.command_error import CommandError
from nnsight_engine.remote_backend.client.connection import Retry, normalized
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError

T = TypeVar("T")

JsonObject = dict[str, Any]

_CONNECT_S: Final = 5.0
_READ_S: Final = 600.0
"""The longest wait for the next byte; the prefill of a long prompt is slow."""
_BUSY: Final = frozenset({429, 503})
_MAX_QUOTED: Final = 500
"""The number of characters that are quoted of an unexpected answer."""


class Server:
    """One server, at an address or on the Unix socket ``uds``; ValueError if the address is invalid."""

    def __init__(self, url: str, key: str = "", uds: str | None = None) -> None:
        self.url = normalized(url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            transport=None if uds is None else httpx.AsyncHTTPTransport(uds=uds),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._client.aclose()

    async def post(self, path: str, body: JsonObject) -> JsonObject:
        return await self.send("POST", path, json=body)

    async def get(self, path: str, **query: str | int) -> JsonObject:
        return await self.send("GET", path, params=query)

    async def send(self, method: str, path: str, **content: Any) -> JsonObject:
        """Send a request, again while the server starts, and return the JSON object of its answer."""

        async def send() -> httpx.Response:
            response = await self._client.request(method, path, **content)
            if response.status_code >= httpx.codes.BAD_REQUEST:
                raise RemoteError.from_response(response)
            return response

        return self._parse_object((await self._with_retries(send)).text)

    async def download(self, path: str, file: BinaryIO) -> None:
        """Write the content of an answer to a file as it arrives."""
        async with contextlib.aclosing(await self._stream("GET", path)) as response:
            try:
                async for piece in response.aiter_bytes():
                    file.write(piece)
            except httpx.TransportError as error:
                raise RemoteConnectionError(f"{self.url} {_interruption(error)}") from error

    async def response(self, path: str, body: JsonObject) -> httpx.Response:
        """Send a request and return its response, refusals included; repeated while the server is busy."""

        async def send() -> httpx.Response:
            response = await self._client.post(path, json=body)
            if response.status_code in _BUSY:
                raise RemoteError.from_response(response)
            return response

        return await self._with_retries(send)

    async def texts(self, path: str, body: JsonObject) -> AsyncGenerator[str, None]:
        """Yield the texts of a streamed completion or chat, without empty ones."""
        async with contextlib.aclosing(self.events(path, body)) as events:
            async for event in events:
                if text := _event_text(event):
                    yield text

    async def events(self, path: str, body: JsonObject) -> AsyncGenerator[JsonObject, None]:
        """Yield the events of a streamed answer; RemoteError if it is refused or ends early."""
        async with contextlib.aclosing(
            await self._stream("POST", path, json={**body, "stream": True})
        ) as response:
            try:
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if data != line:
                        yield self._parse_object(data)
            except httpx.TransportError as error:
                raise RemoteConnectionError(f"{self.url} {_interruption(error)}") from error
        raise RemoteConnectionError(
            f"{self.url} closed the connection before the end of the answer; is it still running?"
        )

    async def _stream(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Return an answer whose body is not read yet; the caller closes it."""

        async def send() -> httpx.Response:
            request = self._client.build_request(method, path, **content)
            response = await self._client.send(request, stream=True)
            if response.status_code >= httpx.codes.BAD_REQUEST:
                async with contextlib.aclosing(response):
                    await response.aread()
                raise RemoteError.from_response(response)
            return response

        return await self._with_retries(send)

    async def _with_retries(self, send: Callable[[], Awaitable[T]]) -> T:
        """Await ``send``, again while the server starts or is busy; raises RemoteError."""
        retry = Retry(self.url, is_repeatable=False)
        while True:
            try:
                return await send()
            except (httpx.TransportError, RemoteError) as error:
                await asyncio.sleep(self._pause_s(retry, error))

    def _pause_s(self, retry: Retry, error: httpx.TransportError | RemoteError) -> float:
        """Return the seconds before the next try, or raise the error for the user if there is none."""
        try:
            return retry.pause_s(error)
        except RemoteConnectionError as ended:
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise RemoteConnectionError(
                    f"no server answers at {self.url}. Start one with `nnsight-engine serve`, or `make "
                    "serve` in a checkout, or set its address with --url or NNSIGHT_ENGINE_URL"
                ) from ended
            if isinstance(error, httpx.TransportError):
                raise RemoteConnectionError(f"{self.url} {_interruption(error)}") from ended
            raise

    def _parse_object(self, text: str) -> JsonObject:
        """Return the JSON object of an answer; RemoteError for other text, or the error that it contains."""
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RemoteError(
                f"{self.url} answered with text that is not a JSON object: {text[:_MAX_QUOTED]!r}. "
                "Is it an NNsight Engine?"
            )
        if "error" in value:
            raise RemoteError.from_body(value)
        return value


def _interruption(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"has sent nothing for {_READ_S:.0f} seconds"
    return f"closed the connection: {str(error) or type(error).__name__}"


def _event_text(event: JsonObject) -> str:
    """Return the text of a chunk of a completion or of a chat; empty if it has none."""
    choices = event.get("choices") or [{}]
    choice = choices[0]
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


_POLL_S: Final = 0.5
_END_S: Final = 60.0
_URL: Final = "http://localhost"


@contextlib.asynccontextmanager
async def own_server(arguments: Sequence[str]) -> AsyncIterator[Server]:
    """Yield a server once it is ready; CommandError without a message if its own is on the terminal."""
    key = secrets.token_urlsafe()
    with tempfile.TemporaryDirectory(prefix="nnsight-engine-") as folder:
        uds = str(Path(folder, "socket"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app", "serve", *arguments, "--uds", uds),
            env={**os.environ, "VLLM_API_KEY": key},
            start_new_session=True,  # Ctrl-C reaches the command alone, which then stops the server
        )
        try:
            await _wait_ready(process, uds)
            async with Server(_URL, key, uds) as server:
                yield server
        finally:
            await _stop(process)


async def _wait_ready(process: asyncio.subprocess.Process, uds: str) -> None:
    """Wait until the server is ready; raises CommandError if its process ends before."""
    transport = httpx.AsyncHTTPTransport(uds=uds)
    async with httpx.AsyncClient(transport=transport, base_url=_URL) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/health/ready")).is_success:
                    return
            await asyncio.sleep(_POLL_S)
    # Ended by itself, it has said why, and that shall be the last line.
    is_killed = process.returncode < 0
    raise CommandError(
        f"the server for the batch was ended by signal {-process.returncode}" if is_killed else ""
    )


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Let the server end by itself, and kill it if it takes too long."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
