"""The server's pages load everything from the server itself."""

from __future__ import annotations

import re
from typing import Final

import httpx

from tests.integration.conftest import Serve, Server
from tests.integration.test_hosts import routes

PAGES: Final = {"/docs", "/redoc", "/playground"}
_LOADED: Final = re.compile(r"""(?:src|href|url|action)\s*=\s*["']?([^"'\s>]+)""", re.IGNORECASE)


async def pages(server: Server) -> dict[str, httpx.Response]:
    """Return every page of the application, found by asking all routes that can be asked without a body."""
    answers = {path: await server.client.get(path) for method, path in routes(server.app) if method == "GET"}
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
