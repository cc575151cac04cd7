"""A server without keys answers its own machine's names and its own pages alone, on every route."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from fastapi import FastAPI
from fastapi.routing import APIWebSocketRoute
from starlette.routing import Route

from api_schemas.keys import Scope
from app.storage.keys import KeyStore
from tests.integration.conftest import ErrorCheck, Serve, Server
from tests.integration.served_routes import SOCKET
from tests.integration.tenants import Tenants

SERVED: Final = {"/docs", "/metrics", "/playground", "/v1/jobs/{job_id}/events", "/health/live", "/v1/status"}

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


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield every method and path of the application, whatever made it."""
    for route in app.routes:
        path = re.sub(r"\{\w+\}", "x", getattr(route, "path"))  # noqa: B009 - of any kind of route
        if isinstance(route, APIWebSocketRoute):
            yield SOCKET, path
            continue
        assert isinstance(route, Route), f"what is {route!r}?"
        for method in sorted(route.methods or ()):
            yield method, path
    yield "GET", "/nothing/is/here"
    yield "OPTIONS", "/v1/completions"


async def ask(server: Server, method: str, path: str, **headers: str) -> Any:
    if method == SOCKET:
        return await Tenants(server).open_socket(path, headers)
    return await server.client.request(method, path, headers=headers)


async def test_the_walk_meets_every_kind_of_route(serve: Serve) -> None:
    async with serve() as server:
        assert {getattr(route, "path", "") for route in server.app.routes} >= SERVED
        found = list(routes(server.app))
        assert len(found) > 40
        assert (SOCKET, "/v1/jobs/x/events") in found


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1@evil"])
async def test_no_route_answers_to_another_s_name(serve: Serve, error_of: ErrorCheck, host: str) -> None:
    async with serve(allow_code=True) as server:
        for method, path in routes(server.app):
            response = await ask(server, method, path, host=host)
            assert response.status_code == 403, (method, path)
            if method != "HEAD":
                assert "NNSIGHT_ENGINE_ALLOWED_HOSTS" in error_of(response, 403, "host_not_allowed")


async def test_no_route_answers_a_page_of_another_origin(serve: Serve, error_of: ErrorCheck) -> None:
    async with serve() as server:
        for method, path in routes(server.app):
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
