"""HTTP load by vLLM's client: rounds are comparable with each other, and only whole answers count."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.http_load import STREAMED, WHOLE, LoadClient, LoadError, LoadOutcome


class Server(ThreadingHTTPServer):
    """Answers completions: whole ones, or with a token less, or not at all."""

    fault = ""
    bodies: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.fault == "refuse" or self.path != "/v1/completions":
            self.send_error(503 if self.server.fault else 404)
            return
        self.server.bodies.append({**body, "authorization": self.headers["Authorization"]})
        usage = {
            "completion_tokens": body["max_tokens"] - (self.server.fault == "fall short"),
            "prompt_tokens": 32,
        }
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(json.dumps({"usage": usage}).encode())
            return
        token = b'data: {"choices":[{"text":"a"}]}\n\n'
        end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
        self.wfile.write(token * usage["completion_tokens"] + end)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.bodies = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sent(server: Server, backend: str, seed: int = 1) -> LoadOutcome:
    return LoadClient().send(
        f"http://127.0.0.1:{server.server_port}", "secret", backend,
        max_concurrency=2, num_prompts=5, random_input_len=32, random_output_len=3, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("backend", [STREAMED, WHOLE])
def test_whole_answers_are_timed_and_rounds_differ_in_prompts_alone(server: Server, backend: str) -> None:
    outcome = sent(server, backend)
    assert outcome.request_s > 0
    assert len(outcome.first_s) == 5
    assert all(first > 0 for first in outcome.first_s)
    assert bool(outcome.gaps_s) is (backend == STREAMED)
    for body in server.bodies:
        assert (body["model"], body["authorization"]) == ("bundled", "Bearer secret")
        assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 3)
    prompts = {body["prompt"] for body in server.bodies}
    assert len(prompts) == 5
    server.bodies.clear()
    sent(server, backend, seed=2)
    assert not prompts & {body["prompt"] for body in server.bodies}


@pytest.mark.parametrize("backend", [STREAMED, WHOLE])
@pytest.mark.parametrize("fault", ["fall short", "refuse"])
def test_other_answers_end_the_round(server: Server, fault: str, backend: str) -> None:
    server.fault = fault
    with pytest.raises(LoadError, match="must have"):
        sent(server, backend)
