"""Who a client is, behind proxies that are trusted and others; and which settings of them are none."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import uvicorn
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from app.server import server_config
from app.settings import Settings
from tests.waiting import wait_for_async

CLIENT = "203.0.113.9"
OLDER = {"x-forwarded-for": f"6.6.6.6, {CLIENT}", "x-forwarded-proto": "https"}
NEWER = {"forwarded": f"for=6.6.6.6, for={CLIENT};proto=https"}


async def told(scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer who the client is, and how it speaks."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{scope['client'][0]} {scope['scheme']}".encode()})


@pytest.mark.parametrize(
    ("trusted", "kind", "headers", "expected"),
    [
        ("127.0.0.1", "x-forwarded-for", OLDER, f"{CLIENT} https"),
        ("10.0.0.0/8, 127.0.0.0/8", "x-forwarded-for", OLDER, f"{CLIENT} https"),
        (f"127.0.0.1,{CLIENT}", "x-forwarded-for", OLDER, "6.6.6.6 https"),
        ("127.0.0.1", "forwarded", NEWER, f"{CLIENT} https"),
        # A header that proxies pass on as clients made it up, and proxies that are none.
        ("127.0.0.1", "forwarded", OLDER, "127.0.0.1 http"),
        ("127.0.0.1", "x-forwarded-for", NEWER, "127.0.0.1 http"),
        ("10.0.0.0/8", "x-forwarded-for", OLDER, "127.0.0.1 http"),
        ("10.0.0.0/8", "forwarded", NEWER, "127.0.0.1 http"),
        ("", "x-forwarded-for", OLDER, "127.0.0.1 http"),
        ("", "forwarded", NEWER, "127.0.0.1 http"),
    ],
)
async def test_a_clients_address_is_the_one_trusted_proxies_name(
    trusted: str, kind: str, headers: dict[str, str], expected: str
) -> None:
    settings = Settings.model_validate({"port": 0, "trusted_proxies": trusted, "proxy_header": kind})
    config = server_config(told, settings)
    config.lifespan = "off"
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await wait_for_async(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/", headers=headers)
    server.should_exit = True
    await serving
    assert answer.text == expected


@pytest.mark.parametrize(
    ("wrong", "got", "step"),
    [
        ("*", "'*'", "list the network of your proxies"),
        ("127.0.0.1, *", "'*'", "list the network of your proxies"),
        ("a.example", "'a.example'", "write the proxy's address"),
        ("10.1.2.3/8", "'10.1.2.3/8'", "write 10.0.0.0/8 for the network, or 10.1.2.3 for the one address"),
        ("fd00::7/64", "'fd00::7/64'", "write fd00::/64 for the network, or fd00::7 for the one address"),
        ("10.0.0.0/40", "'10.0.0.0/40'", "write the proxy's address"),
    ],
)
def test_what_is_no_address_is_no_proxy(wrong: str, got: str, step: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"trusted_proxies": wrong})
    (problem,) = caught.value.errors()
    assert "such as 10.1.2.3 or 10.0.0.0/8" in problem["msg"]
    assert f"got {got}; " in problem["msg"]
    assert step in problem["msg"]
