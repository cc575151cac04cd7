"""HTTP load by vLLM's client: rounds are comparable with each other, and only whole answers count."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.clients import http_load
from benchmarks.clients.http_load import Load, LoadError


def load_of(url: str = "", *, streams: bool = True, seed: int = 1) -> Load:
    return Load(
        url=url, concurrency=2, num_requests=5, prompt_tokens=32,
        min_tokens=2, max_tokens=4, seed=seed, key="secret", streams=streams,
    )  # fmt: skip


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


def test_rounds_differ_in_prompts_alone() -> None:
    one, other = (load_of(seed=seed).requests() for seed in (1, 2))
    assert [body.expected_output_len for body in one] == [body.expected_output_len for body in other]
    assert all(first.prompt != second.prompt for first, second in zip(one, other, strict=True))
    assert one == load_of(seed=1).requests()
    assert all(len(body.prompt) == 32 for body in one)


@pytest.mark.parametrize("streams", [False, True])
async def test_whole_answers_are_timed(server: Server, streams: bool) -> None:
    load = load_of(f"http://127.0.0.1:{server.server_port}", streams=streams)
    outcome = await http_load.send(load)
    assert outcome.request_s > 0
    assert len(outcome.first_s) == 5
    assert all(first > 0 for first in outcome.first_s)
    assert bool(outcome.gaps_s) is streams
    sent = [(body["prompt"], body["max_tokens"]) for body in server.bodies]
    assert sorted(sent) == sorted((one.prompt, one.expected_output_len) for one in load.requests())
    for body in server.bodies:
        assert (body["model"], body["authorization"]) == ("bundled", "Bearer secret")
        assert (body["temperature"], body["ignore_eos"]) == (0, True)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("fault", ["fall short", "refuse"])
async def test_other_answers_end_the_round(server: Server, fault: str, streams: bool) -> None:
    server.fault = fault
    with pytest.raises(LoadError, match="must have"):
        await http_load.send(load_of(f"http://127.0.0.1:{server.server_port}", streams=streams))
