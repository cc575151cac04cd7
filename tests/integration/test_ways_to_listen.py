"""TLS, Unix sockets and a path prefix: the same answers, probes among them."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.http_options import listening_options
from tests.integration.command_server import ARGUMENTS
from tests.integration.serving import Served, listening, port_of

PATHS = ["/health", "/health/live", "/metrics", "/v1/models"]


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path, inline_tensor_bytes=0)


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


async def test_over_tls(served: Served, certificate: dict[str, str]) -> None:
    async with listening(served.app, served.settings, **certificate) as server:
        trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        url = f"https://127.0.0.1:{port_of(server)}"
        async with httpx.AsyncClient(base_url=url, verify=trust) as client:
            assert {status async for status in statuses(client)} == {200}
        async with httpx.AsyncClient(base_url=url.replace("https", "http")) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get("/health/live")


async def test_clients_need_a_certificate_if_that_is_required(
    served: Served, certificate: dict[str, str]
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


async def test_only_the_chosen_ciphers_are_offered(served: Served, certificate: dict[str, str]) -> None:
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


async def test_over_a_unix_socket(served: Served, tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    async with listening(served.app, served.settings, uds=path):
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as client:
            assert {status async for status in statuses(client)} == {200}


@pytest.mark.parametrize("sent", ["", "/behind/proxy"])
async def test_below_a_prefix_whether_or_not_a_proxy_strips_it(served: Served, sent: str) -> None:
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
