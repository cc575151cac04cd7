"""Whose requests are answered: hosts, origins of pages, what pages may load, clients behind proxies."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import httpx
import pytest
import uvicorn
from pydantic import ValidationError
from starlette.types import Receive, Send

from api_schemas.administration import Scope
from app.server.uvicorn import server_config
from app.settings import Settings
from app.storage.keys import KeyStore
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.served_routes import ROUTES, SOCKET
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async

OWN_HOSTS: Final = ["localhost", "localhost:8000", "LOCALHOST:80", "127.0.0.1", "127.9.9.9:1", "[::1]:8000"]
OTHER_HOSTS: Final = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil",
    "evil@127.0.0.1", "localhost@evil.example", "localhost:8000@evil", "localhost/", "localhost#",
    "localhost?", "localhost\\evil", "localhost evil", "localhost:", "localhost:x", "[::1", "::1", "0.0.0.0",
    "127.1", "",
]  # fmt: skip
OWN_ORIGINS: Final = [
    ("localhost", "http://localhost"), ("localhost:8000", "http://localhost:8000"),
    ("[::1]:8000", "http://[::1]:8000"), ("localhost", "https://localhost"),
]  # fmt: skip
OTHER_ORIGINS: Final = [
    ("localhost", "null"), ("localhost", "https://evil.example"), ("localhost:8000", "http://localhost:3000"),
    ("localhost:8000", "http://localhost"), ("localhost", "http://localhost:3000"), ("localhost", ""),
    ("localhost:8000", "http://127.0.0.1:8000"), ("localhost", "http://localhost@evil"),
    ("localhost", "file://"), ("localhost", "http://localhost/"), ("localhost", "vscode://localhost"),
]  # fmt: skip


WALK: Final = [
    *((route.method, re.sub(r"\{\w+\}", "x", route.path)) for route in ROUTES),
    ("GET", "/nothing/is/here"), ("OPTIONS", "/v1/completions"), ("HEAD", "/playground"),
]  # fmt: skip
"""A method and a path of every route, and of others."""


async def ask(server: Server, method: str, path: str, **headers: str) -> Any:
    if method == SOCKET:
        return await Tenants(server).open_socket(path, headers)
    return await server.client.request(method, path, headers=headers)


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1@evil"])
async def test_no_route_answers_to_another_s_name(serve: Serve, error_of: ErrorCheck, host: str) -> None:
    async with serve(allow_code=True) as server:
        for method, path in WALK:
            response = await ask(server, method, path, host=host)
            assert response.status_code == 403, (method, path)
            if method != "HEAD":
                assert "NNSIGHT_ENGINE_ALLOWED_HOSTS" in error_of(response, 403, "host_not_allowed")


async def test_no_route_answers_a_page_of_another_origin(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve() as server:
        for method, path in WALK:
            response = await ask(server, method, path, host="localhost:8000", origin="http://localhost:3000")
            assert response.status_code == 403, (method, path)
            if method != "HEAD":
                error_of(response, 403, "origin_not_allowed")


@pytest.mark.parametrize("path", ["/health/live", "/v1/jobs/x/events"])
async def test_which_hosts_and_origins_are_its_own(serve: Serve, path: str) -> None:
    method, let_in = (SOCKET, 404) if path.startswith("/v1") else ("GET", 200)
    async with serve(allowed_hosts="gpu7.example, Box") as server:
        for host in [*OWN_HOSTS, "gpu7.example:8000", "box"]:
            assert (await ask(server, method, path, host=host)).status_code == let_in, host
        for host, origin in OWN_ORIGINS:
            assert (await ask(server, method, path, host=host, origin=origin)).status_code == let_in, origin
        for host in OTHER_HOSTS:
            assert (await ask(server, method, path, host=host)).status_code == 403, host
        for host, origin in OTHER_ORIGINS:
            assert (await ask(server, method, path, host=host, origin=origin)).status_code == 403, origin


async def test_two_hosts_are_none(serve: Serve) -> None:
    async with serve() as server:
        headers = [("host", "localhost"), ("host", "evil.example")]
        assert (await server.client.get("/health/live", headers=headers)).status_code == 403


async def test_with_keys_names_are_free_and_sockets_still_look_at_the_page(serve: Serve) -> None:
    async with serve() as server:
        tenants = Tenants(server)
        key = await tenants.headers("acme", Scope.CODE)
        for host in ("models.example", "gpu7:8000"):
            assert (await ask(server, "GET", "/health/live", host=host)).status_code == 200
            assert (await ask(server, "GET", "/v1/jobs", host=host, **key)).status_code == 200
        path, host = "/v1/jobs/x/events", "models.example"
        for origin, status in [("https://models.example", 404), ("https://models.example:3000", 403)]:
            assert (await ask(server, SOCKET, path, host=host, origin=origin, **key)).status_code == status


async def test_a_database_that_is_away_opens_no_door(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_store: KeyStore) -> bool:
        raise OSError("the database is away")

    async with serve() as server:
        monkeypatch.setattr(KeyStore, "is_used", fails)
        assert (await ask(server, "GET", "/health/live", host="localhost")).status_code == 200
        assert (await ask(server, "GET", "/health/live", host="evil.example")).status_code == 403


PAGES: Final = {"/docs", "/redoc", "/playground"}
_LOADED: Final = re.compile(r"""(?:src|href|url|action)\s*=\s*["']?([^"'\s>]+)""", re.IGNORECASE)


async def pages(server: Server) -> dict[str, httpx.Response]:
    """Return every page of the application, found by asking all routes that can be asked without a body."""
    answers = {path: await server.client.get(path) for method, path in WALK if method == "GET"}
    return {path: one for path, one in answers.items() if "html" in one.headers.get("content-type", "")}


async def test_no_page_refers_to_another_origin(serve: Serve) -> None:
    async with serve() as server:
        found = await pages(server)
        assert set(found) == PAGES
        for path, page in found.items():
            loaded = [url for url in _LOADED.findall(page.text) if not url.startswith(("data:", "#"))]
            assert loaded, path
            for url in loaded:
                assert not re.match(r"[a-z]*:?//", url, re.IGNORECASE), (path, url)
                asset = await server.client.get(f"/{url}")
                assert asset.status_code == 200, (path, url)
                assert not re.search(r"https?://(cdn|cdnjs|fonts|unpkg)\b", asset.text), (path, url)


async def test_the_root_leads_browsers_to_the_playground_and_nobody_else(serve: Serve) -> None:
    for has_page in (True, False):
        async with serve(playground=has_page) as server:
            html = await server.client.get(
                "/", headers={"accept": "text/html,application/xml;q=0.9,*/*;q=0.8"}
            )
            plain = await server.client.get("/")
        assert (html.status_code, html.headers.get("location")) == (
            (307, "/playground") if has_page else (404, None)
        )
        assert (plain.status_code, plain.json()["error"]["code"]) == (404, "not_found")


async def test_every_page_may_load_what_this_server_has_alone(serve: Serve) -> None:
    async with serve() as server:
        for path, page in (await pages(server)).items():
            policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == policy["font-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
            assert not re.search(r"\*|https?:|blob:|unsafe-eval", " ".join(policy.values()))
            assert not re.search(r"<script[^>]*>[^<\s]|\son\w+=", page.text), path  # nothing inline


async def test_pages_of_documentation_have_no_other_files(serve: Serve) -> None:
    async with serve() as server:
        for name in ("favicon.png", "nothing.js", "..%2fcore.py"):
            assert (await server.client.get(f"/docs/assets/{name}")).status_code == 404
        answer = await server.client.get("/docs/assets/swagger-ui.css")
        again = {"if-none-match": answer.headers["etag"]}
        assert (await server.client.get("/docs/assets/swagger-ui.css", headers=again)).status_code == 304


CLIENT = "203.0.113.9"
OLDER = {"x-forwarded-for": f"6.6.6.6, {CLIENT}", "x-forwarded-proto": "https"}
NEWER = {"forwarded": f"for=6.6.6.6, for={CLIENT};proto=https"}


async def told(scope: Any, _receive: Receive, send: Send) -> None:
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
