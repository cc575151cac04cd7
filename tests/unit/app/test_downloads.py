"""Which bytes of a stored file are sent, by what was asked for."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from app.request_context import begin_context
from app.services.downloads import download
from app.storage.open_files import OpenFile, OpenResult


async def never() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def fetched(content: bytes, asked: str | None) -> tuple[int, bytes, str]:
    """Return the status, the content, and which range that is said to be."""
    headers = [] if asked is None else [(b"range", asked.encode())]
    request = Request({"type": "http", "method": "GET", "headers": headers})
    reading = cast("OpenFile", SimpleNamespace(num_bytes=len(content), close=lambda: None))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    file = OpenResult(io.BytesIO(content), reading)
    response = await download(request, file, media_type="text/plain", tag='"a"', stall_s=10)
    begin_context(request.scope)
    await response(request.scope, never, send)
    said = dict(sent[0]["headers"]).get(b"content-range", b"")
    body = b"".join(message["body"] for message in sent[1:])
    return sent[0]["status"], body, said.decode()


@pytest.mark.parametrize("content", [b"", b"a", b"abcdef"])
@pytest.mark.parametrize("asked", [None, "bytes=", "bytes=-", "lines=1-2", "bytes=3-1", "bytes=0-0,2-3"])
async def test_without_a_range_that_is_one_all_is_sent(content: bytes, asked: str | None) -> None:
    assert await fetched(content, asked) == (200, content, "")


@pytest.mark.parametrize(
    ("asked", "body", "said"),
    [
        ("bytes=1-2", b"bc", "bytes 1-2/6"),
        ("bytes=4-", b"ef", "bytes 4-5/6"),
        ("bytes=-2", b"ef", "bytes 4-5/6"),
        ("bytes=5-99", b"f", "bytes 5-5/6"),
    ],
)
async def test_a_range_is_sent_as_a_part(asked: str, body: bytes, said: str) -> None:
    assert await fetched(b"abcdef", asked) == (206, body, said)


@pytest.mark.parametrize(
    ("content", "asked"),
    [(b"abc", "bytes=3-"), (b"abc", "bytes=-0"), (b"", "bytes=0-"), (b"", "bytes=0-5"), (b"", "bytes=-0")],
)
async def test_a_range_behind_the_end_is_refused(content: bytes, asked: str) -> None:
    status, body, said = await fetched(content, asked)
    assert (status, said) == (416, f"bytes */{len(content)}")
    assert b"range_not_satisfiable" in body


async def test_the_last_bytes_of_an_empty_file_are_all_of_it() -> None:
    assert await fetched(b"", "bytes=-5") == (200, b"", "")
