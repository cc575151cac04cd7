"""Media of requests are fetched only where the operator lets clients have it done."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.connections import HTTPConnection
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError

from app.engine.media import GuardedMediaConnector
from app.formats.json_bodies import num_media_characters
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


KINDS = ("image", "audio", "video", "image_embedding", "audio_embedding", "video_embedding")
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "ICO", "JPEG2000", "TGA", "DDS", "QOI", "AVIF")
OPTIONS = ("image_mode", "rgba_background_color", "video_backend", "backend", "num_frames", "fps", "other")


def claimed_png(width: int, height: int) -> bytes:
    """Return a PNG whose header has a size, and whose data end after some pixels."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(9))),
    ]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (*parts, (b"IEND", b""))
    ]
    return b"".join([b"\x89PNG\r\n\x1a\n", *chunks])


def whole_media() -> list[bytes]:
    found = []
    for name in FORMATS:
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16), (9, 8, 7)).save(buffer, name)
        found.append(buffer.getvalue())
    for save in (np.save, lambda file, value: torch.save(torch.tensor(value), file)):  # noqa: TID251 - clients do
        buffer = io.BytesIO()
        save(buffer, np.ones((3, 4), np.float32))
        found.append(buffer.getvalue())
    return found


def broken(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        changed[rng.randrange(min(len(data), 60))] = rng.choice((0, 255, rng.randrange(256)))
    return bytes(changed)


def status_of(kind: str, given: str, *, waits: bool, **options: Any) -> int:
    """Return the status with which vLLM answers the error of a fetch; 200 if there is none."""
    connector = GuardedMediaConnector(media_io_kwargs=options)
    try:
        if waits:
            getattr(connector, f"fetch_{kind}")(given)
        else:
            asyncio.run(getattr(connector, f"fetch_{kind}_async")(given))
    except Exception as error:  # noqa: BLE001 - the status of each is asked
        return int(create_error_response(error).error.code)
    return 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_media_that_cannot_be_decoded_are_the_request_s_fault(kind: str) -> None:
    rng = random.Random(kind)
    sizes = ((60_000, 60_000), (2**31 - 1, 2**31 - 1), (0, 0))
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, %d)}" % (10**7, 10**7)
    vast_array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
    given = [b"", b"x", vast_array, *(claimed_png(*size) for size in sizes)]
    given += [broken(data, rng) for data in whole_media() for _ in range(30)]
    found = set()
    for index, data in enumerate(given):
        url = "" if kind.endswith("embedding") else "data:image/png;base64,"
        found.add(status_of(kind, url + base64.b64encode(data).decode(), waits=index % 4 > 0))
    assert found - {200} == {400}
    for text in ("data:,x", "data:x", "data:;base64,é", "ftp://x", "http://[", ""):
        assert status_of(kind, text, waits=True) == 400


def test_options_of_media_that_no_decoder_has_are_the_request_s_fault() -> None:
    image = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    for name in OPTIONS:
        values: list[Any] = [7, -1, "x", [], {}, [300, 0, 0], 1e9, 10**30]
        for value in values:
            for kind in ("image", "audio", "video"):
                status = status_of(kind, image, waits=True, **{kind: {name: value}})
                assert status in {200, 400}, (kind, name, value)


def test_an_image_too_large_to_be_opened_is_refused_with_the_reason() -> None:
    data = base64.b64encode(claimed_png(60_000, 60_000)).decode()
    with pytest.raises(VLLMValidationError, match=r"image .* cannot be decoded .*3600000000 pixels"):
        fetch(f"data:image/png;base64,{data}")


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
    for field in ("interventions", "chat_template_kwargs"):
        assert num_media_characters({field: {"content": parts}, "messages": [{"content": "a"}]}) == 0
        assert num_media_characters({field: [{"content": parts}]}) == 0
