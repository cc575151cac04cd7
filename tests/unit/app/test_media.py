"""Media of requests are fetched only where the operator lets clients have it done."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError

from app.engine.media import GuardedMediaConnector
from app.media_parts import num_media_characters
from app.process_environment import set_engine_defaults

SIZE = (3, 2)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", SIZE).save(buffer, "PNG")
    return buffer.getvalue()


class Host:
    """A web server with an image, and with a redirect to it."""

    def __init__(self) -> None:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                if self.path == "/gone":
                    self.send_error(404)
                    return
                self.send_response(302 if self.path == "/moved" else 200)
                self.send_header("Location", "/image.png")
                self.end_headers()
                if self.path == "/image.png":
                    self.wfile.write(png())

            def log_message(self, *_args: Any) -> None:
                pass

        self.asked = asked
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def fetch(url: str, *domains: str, folder: str = "", waits: bool = False) -> Any:
    connector = GuardedMediaConnector(
        connection=HTTPConnection(reuse_client=False),
        allowed_media_domains=list(domains),
        allowed_local_media_path=folder,
    )
    if waits:
        return connector.fetch_image(url)
    return asyncio.run(connector.fetch_image_async(url))


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM not try again."""
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")


@pytest.mark.parametrize("waits", [True, False])
def test_no_host_is_asked_unless_the_operator_names_it(host: Host, waits: bool) -> None:
    for domains, message in (((), "--allowed-media-domains"), (("example.org",), "allowed domains")):
        with pytest.raises((VLLMClientError, ValueError), match=message):
            fetch(f"{host.url}/image.png", *domains, waits=waits)
    assert host.asked == []
    assert fetch(f"{host.url}/image.png", "127.0.0.1", waits=waits).size == SIZE


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_does_not_answer_is_the_request_s_fault(host: Host, waits: bool) -> None:
    for url in (f"{host.url}/gone", "http://127.0.0.1:9/image.png"):
        with pytest.raises(VLLMUnprocessableEntityError):
            fetch(url, "127.0.0.1", waits=waits)


def test_a_redirect_does_not_lead_to_another_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", raising=False)
    set_engine_defaults()
    with pytest.raises((VLLMClientError, ValueError)):
        fetch(f"{host.url}/moved", "127.0.0.1")
    assert host.asked == ["/moved"]


def test_files_are_read_only_from_the_operator_s_folder(tmp_path: Path) -> None:
    image = tmp_path / "inside" / "image.png"
    image.parent.mkdir()
    Image.new("RGB", SIZE).save(image)
    with pytest.raises(VLLMValidationError, match="--allowed-local-media-path"):
        fetch(image.as_uri())
    assert fetch(image.as_uri(), folder=str(image.parent)).size == SIZE


def test_media_do_not_count_as_text() -> None:
    url = "data:" + "A" * 1000
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "base64", "data": url}},
        {"type": "text", "text": url, "image_url": url},
        {"type": ["image_url"], "image_url": url},
        7,
    ]
    assert num_media_characters({"messages": [{"role": "user", "content": parts}]}) == 4 * len(url)
    result = {"type": "tool_result", "content": parts[:1]}
    assert num_media_characters({"messages": [{"content": [result]}]}) == len(url)
    schema = {"properties": {"content": parts}, "content": parts}
    assert num_media_characters({"tools": [{"function": {"parameters": schema}}], "messages": 3}) == 0
