"""vLLM's options for HTTP: TLS, sockets, prefixes, origins, middleware, documentation, heads, the log."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import ipaddress
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth.keys import GivenKeys
from app.command_error import CommandError
from app.observability import logs
from app.server.http_options import HttpOptions, listening_options, log_options
from app.server.sockets import HeadLimits
from tests.integration.command_server import ARGUMENTS, started
from tests.integration.serving import Application, listening, port_of
from tests.integration.test_logs import Log, log
from tests.waiting import wait_for_async

PATHS = ["/health", "/health/live", "/metrics", "/v1/models"]


@pytest.fixture
def served(tmp_path: Path) -> Application:
    return Application(tmp_path, inline_tensor_bytes=0)


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    return certificate_files(tmp_path)


def certificate_files(folder: Path) -> dict[str, str]:
    """Return the files of a new certificate for this machine, signed by its own key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = {"ssl_certfile": folder / "cert.pem", "ssl_keyfile": folder / "key.pem"}
    files["ssl_certfile"].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files["ssl_keyfile"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return {name: str(file) for name, file in files.items()}


async def statuses(client: httpx.AsyncClient) -> AsyncIterator[int]:
    for path in PATHS:
        yield (await client.get(path)).status_code
    body = {"prompt": "one two", "stream": True, "interventions": []}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line async for line in answer.aiter_lines()]
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_over_tls(served: Application, certificate: dict[str, str]) -> None:
    async with listening(served.app, served.settings, **certificate) as server:
        trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        url = f"https://127.0.0.1:{port_of(server)}"
        async with httpx.AsyncClient(base_url=url, verify=trust) as client:
            assert {status async for status in statuses(client)} == {200}
        async with httpx.AsyncClient(base_url=url.replace("https", "http")) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get("/health/live")


async def test_clients_need_a_certificate_if_that_is_required(
    served: Application, certificate: dict[str, str]
) -> None:
    required = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": certificate["ssl_certfile"]}
    options = listening_options(argparse.Namespace(**{**ARGUMENTS, **certificate, **required}))
    async with listening(served.app, served.settings, **options) as server:
        url = f"https://127.0.0.1:{port_of(server)}/health/live"
        trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        async with httpx.AsyncClient(verify=trust) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(url)
        trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        trust.load_cert_chain(certificate["ssl_certfile"], certificate["ssl_keyfile"])
        async with httpx.AsyncClient(verify=trust) as client:
            assert (await client.get(url)).is_success


async def test_only_the_chosen_ciphers_are_offered(served: Application, certificate: dict[str, str]) -> None:
    chosen = {"ssl_ciphers": "ECDHE-ECDSA-AES256-GCM-SHA384"}
    options = listening_options(argparse.Namespace(**{**ARGUMENTS, **certificate, **chosen}))
    async with listening(served.app, served.settings, **options) as server:
        for cipher, is_offered in (
            ("ECDHE-ECDSA-AES256-GCM-SHA384", True), ("ECDHE-ECDSA-AES128-GCM-SHA256", False),
        ):  # fmt: skip
            trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
            trust.maximum_version = ssl.TLSVersion.TLSv1_2  # the option is for versions up to this
            trust.set_ciphers(cipher)
            async with httpx.AsyncClient(verify=trust) as client:
                try:
                    answer = await client.get(f"https://127.0.0.1:{port_of(server)}/health/live")
                except httpx.ConnectError:
                    assert not is_offered
                else:
                    assert is_offered
                    assert answer.is_success


async def test_over_a_unix_socket(served: Application, tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    async with listening(served.app, served.settings, uds=path):
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as client:
            assert {status async for status in statuses(client)} == {200}


@pytest.mark.parametrize("sent", ["", "/behind/proxy"])
async def test_below_a_prefix_whether_or_not_a_proxy_strips_it(served: Application, sent: str) -> None:
    served.app.root_path = "/behind/proxy"
    async with (
        listening(served.app, served.settings) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(server)}{sent}") as client,
    ):
        assert {status async for status in statuses(client)} == {200}
        assert (await client.post("/v1/responses", json={"input": "x"})).status_code == 200
        capture = {"op": "capture", "at": "layers.1.output", "name": "c"}
        body = {"prompt": "one two", "interventions": [capture]}
        answer = (await client.post("/v1/completions", json=body)).json()
        (point,) = answer["choices"][0]["interventions"]["results"]["c"]["points"].values()
        assert point["url"].startswith("/behind/proxy/v1/results/")
        assert (await client.get(point["url"].removeprefix("/behind/proxy"))).status_code == 200


__all__ = ["log"]  # a fixture

PAGE = "https://page.example"
KEY = {"authorization": "Bearer secret"}


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**ARGUMENTS, **given})


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, *, with_keys: bool = True, **given: Any
) -> AsyncIterator[httpx.AsyncClient]:
    keys = GivenKeys(["secret"] if with_keys else [])
    served = Application(tmp_path, given_keys=keys, http=HttpOptions.of(arguments(**given)))
    async with served.started(raises=False) as client:
        yield client


def preflight(origin: str = PAGE) -> dict[str, str]:
    asks = {"method": "POST", "headers": "authorization,content-type"}
    return {"origin": origin, **{f"access-control-request-{name}": value for name, value in asks.items()}}


async def test_pages_of_allowed_origins_may_ask_and_read_every_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, allowed_origins=[PAGE], allow_credentials=True) as client:
        asked = await client.options("/v1/completions", headers=preflight())
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-credentials"] == "true"
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        body = {"prompt": "a b"}
        for path, headers, status in (
            ("/v1/completions", KEY, 200),
            ("/v1/completions", {}, 401),
            ("/v1/nothing", KEY, 404),
        ):
            answer = await client.post(path, json=body, headers={**headers, "origin": PAGE})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
        other = await client.options("/v1/completions", headers=preflight("https://other.example"))
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


async def test_methods_and_headers_of_pages_are_limited(tmp_path: Path) -> None:
    given: dict[str, Any] = {"allowed_methods": ["GET"], "allowed_headers": ["x-mine"]}
    async with serving(tmp_path, allowed_origins=["*"], **given) as client:
        refused = await client.options("/v1/completions", headers=preflight())
        assert (refused.status_code, refused.text) == (400, "Disallowed CORS method, headers")


async def test_without_the_option_no_page_of_another_origin_reads_anything(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        answer = await client.get("/v1/models", headers={**KEY, "origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.options("/v1/completions", headers=preflight())).status_code == 405


async def test_without_keys_only_pages_of_named_origins_are_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, with_keys=False, allowed_origins=[PAGE]) as client:
        assert (await client.get("/v1/models", headers={"origin": PAGE})).status_code == 200
        refused = await client.get("/v1/models", headers={"origin": "https://other.example"})
        assert refused.json()["error"]["code"] == "origin_not_allowed"


async def note(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Add a header with the path, as a function."""
    answer = await call_next(request)
    answer.headers["x-noted"] = request.url.path
    return answer


class Order:
    """Adds a header with what was added before, as a class."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = [name for name, _ in message["headers"] if name.startswith((b"x-noted", b"access"))]
                message["headers"].append((b"x-before", b" ".join(sorted(names))))
            await send(message)

        await self.app(scope, receive, sent)


async def test_an_operators_middleware_sees_every_answer_the_last_one_outermost(tmp_path: Path) -> None:
    chosen = [f"{__name__}.note", f"{__name__}.Order"]
    async with serving(tmp_path, middleware=chosen, allowed_origins=[PAGE]) as client:
        for path, status in (("/v1/models", 401), ("/health/live", 200)):
            answer = await client.get(path, headers={"origin": PAGE})
            assert (answer.status_code, answer.headers["x-noted"]) == (status, path)
            assert "x-noted" in answer.headers["x-before"].split()
            assert "access-control-allow-origin" in answer.headers["x-before"].split()
        body = {"prompt": "a b", "stream": True}
        streamed = await client.post("/v1/completions", json=body, headers=KEY)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert streamed.headers["x-noted"] == "/v1/completions"


async def test_documentation_is_served_unless_it_is_disabled(tmp_path: Path) -> None:
    paths = ("/docs", "/redoc", "/openapi.json", "/docs/assets/swagger-ui.css")
    async with serving(tmp_path, enable_offline_docs=True) as client:
        assert [(await client.get(path)).status_code for path in paths] == [200] * 4
    async with serving(tmp_path, disable_fastapi_docs=True) as client:
        assert [(await client.get(path)).status_code for path in paths] == [404] * 4
        assert (await client.get("/playground")).status_code == 200


async def test_without_keys_not_all_origins_may_be_allowed(tmp_path: Path) -> None:
    given = json.dumps({"allowed_origins": ["*"]})
    async with started(tmp_path, ARGUMENTS=given) as server:
        assert await server.ended() == 1
        assert server.process.stderr is not None
        message = (await server.process.stderr.read()).decode()
        assert "--allowed-origins '[\"*\"]' needs keys" in message


@pytest.mark.parametrize("is_enabled", [False, True])
async def test_an_answer_has_the_id_of_its_request_if_that_is_enabled(
    tmp_path: Path, is_enabled: bool
) -> None:
    async with serving(tmp_path, enable_request_id_headers=is_enabled) as client:
        mine = await client.get("/v1/models", headers={**KEY, "x-request-id": "mine"})
        assert (mine.headers["x-request-id"] == "mine") is is_enabled
        assert len((await client.get("/v1/models", headers=KEY)).headers["x-request-id"]) == 24


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_origins": "*"}, "--allowed-origins must be a JSON list"),
        ({"allowed_methods": [1]}, "--allowed-methods must be a JSON list"),
        ({"middleware": ["nowhere.at.all"]}, "--middleware nowhere.at.all cannot be imported"),
        ({"middleware": ["plain"]}, "--middleware plain cannot be imported"),
        ({"middleware": ["math.pi"]}, "must name a class, or a function with `async def`"),
        ({"h11_max_header_count": 0}, "--h11-max-header-count must be at least 1, got 0"),
        ({"enable_ssl_refresh": True}, "--enable-ssl-refresh needs --ssl-certfile"),
        ({"ssl_keyfile": __file__}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_certfile": "/nowhere"}, "--ssl-certfile must be a file"),
        ({"uvicorn_log_level": "trace"}, "--uvicorn-log-level trace is not supported: uvicorn logs headers"),
    ],
)
def test_a_value_without_meaning_is_refused_by_the_name_of_its_option(
    given: dict[str, Any], message: str
) -> None:
    args = arguments(**given)
    with pytest.raises(CommandError) as caught:
        for read in (HttpOptions.of, listening_options, log_options):
            read(args)
    assert message in str(caught.value)


async def head(port: int, size: int, count: int) -> bytes:
    """Return the answer to a request with so many headers, which have so many bytes in total."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"x-{index}: {'a' * (size // count)}\r\n" for index in range(count)]
    content = "content-length: 2\r\n\r\n{}"
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{''.join(lines)}{content}".encode())
    found = await reader.readuntil(b"}")
    writer.close()
    return found


async def test_heads_have_the_limits_that_are_given(tmp_path: Path) -> None:
    served = Application(tmp_path)
    options = listening_options(arguments(h11_max_incomplete_event_size=200_000, h11_max_header_count=20))
    assert listening_options(arguments()) == {"head_limits": HeadLimits()}
    async with listening(served.app, served.settings, **options) as server:
        port = port_of(server)
        assert b" 400 " in (await head(port, 150_000, 10)).splitlines()[0]  # it lacks `prompt`
        for size, count in ((250_000, 10), (1000, 30)):
            refused = await head(port, size, count)
            assert b" 431 " in refused.splitlines()[0]
            assert b"head_too_large" in refused


async def trusted(certificate: str, port: int) -> bool:
    """Return whether a server answers with this certificate."""
    trust = ssl.create_default_context(cafile=certificate)
    try:
        async with httpx.AsyncClient(verify=trust) as client:
            return (await client.get(f"https://127.0.0.1:{port}/health/live")).is_success
    except httpx.TransportError:
        return False


async def test_the_command_serves_a_new_certificate_if_that_is_enabled(tmp_path: Path) -> None:
    files = certificate_files(tmp_path)
    given = json.dumps({**files, "enable_ssl_refresh": True})
    async with started(tmp_path, ARGUMENTS=given) as server:
        port = server.client.base_url.port or 0
        await wait_for_async(lambda: trusted(files["ssl_certfile"], port))
        # As between the replacement of the one file and of the other.
        await asyncio.to_thread(Path(files["ssl_keyfile"]).write_text, "half a key")
        await asyncio.sleep(2.5)  # it has looked
        assert await trusted(files["ssl_certfile"], port)
        certificate_files(tmp_path)
        assert not await trusted(files["ssl_certfile"], port)
        await wait_for_async(lambda: trusted(files["ssl_certfile"], port))


async def test_requests_to_named_routes_or_all_are_left_out_of_the_log(log: Log, tmp_path: Path) -> None:
    excluded = "/health/live, /v1/models"
    logs.limit_logs(**log_options(arguments(disable_access_log_for_endpoints=excluded)))
    async with serving(tmp_path) as client:
        for path in ("/health/live", "/v1/models", "/v1/status"):
            await client.get(path, headers=KEY)
        routes = [json.loads(line).get("route") for line in log.text.splitlines()]
        assert [one for one in routes if one] == ["/v1/status"]
        logs.limit_logs(**log_options(arguments(disable_uvicorn_access_log=True)))
        await client.get("/v1/status", headers=KEY)
        assert log.text.count("/v1/status") == 1


def test_the_level_of_uvicorn_is_raised(log: Log) -> None:
    logs.limit_logs(**log_options(arguments()))
    logging.getLogger("uvicorn").info("first")
    logs.limit_logs(**log_options(arguments(uvicorn_log_level="error")))
    logging.getLogger("uvicorn").warning("second")
    assert "first" in log.text
    assert "second" not in log.text
