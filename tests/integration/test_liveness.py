"""The liveness helpers detect a server that blocks its event loop, and report no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.liveness import Bystanders


class Server(ThreadingHTTPServer):
    """Answers everything at once, unless it is held.

    Attributes:
        paths: What waits while it is.
        status: Of its answers.
    """

    paths: frozenset[str] = frozenset()
    status = 200


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        while self.path in self.server.paths:
            time.sleep(0.01)
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answer) as made:
        serving = threading.Thread(target=made.serve_forever)
        serving.start()
        yield made
        made.shutdown()
        serving.join()


def test_bystanders_are_unharmed_when_nothing_happens(server: Server):
    Bystanders(server.server_port).unharmed(lambda _: time.sleep(0.2), lambda _: None)


@pytest.mark.parametrize("path", ["/health/live", "/v1/completions"])
def test_a_delayed_bystander_is_found(server: Server, path: str):
    def send(_: int) -> None:
        server.paths = frozenset({path})
        time.sleep(1)
        server.paths = frozenset()

    with pytest.raises(AssertionError, match="alone"):
        Bystanders(server.server_port).unharmed(lambda _: None, send)


def test_a_bystander_who_is_refused_is_found(server: Server):
    def refuse(number: int) -> None:
        server.status = 503
        time.sleep(1)
        server.status = 200

    with pytest.raises(AssertionError, match="alone"):
        Bystanders(server.server_port).unharmed(refuse)
