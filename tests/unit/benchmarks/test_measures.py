"""What tables compare: batches that ran whole, answers that are whole, and values that are the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.case import NotMeasuredError, Plan, growth_power
from benchmarks.decoding import DecodingBatch
from benchmarks.engine import BenchmarkError
from benchmarks.http_load import STREAMED, WHOLE, LoadClient, LoadError
from benchmarks.interventions import LayerSizes, nothing
from benchmarks.peers.tasks import SMALL, Task
from benchmarks.report import rows_of
from benchmarks.runner import run
from benchmarks.tables.peers import OURS, comparison


class FakeEngine:
    """Gives each request a token a step, ``num_ahead`` steps late; the last one in every ``period``-th."""

    shape = LayerSizes(2, 4)

    def __init__(self, num_ahead: int, period: int, trace: object) -> None:
        self.num_steps = self.num_tokens = 0
        self.num_ahead, self._period, self._trace = num_ahead, period, trace
        self._left: list[int] = []

    def submit(self, _prompt: list[int], max_tokens: int, _content: object) -> Any:
        self._left.append(max_tokens)
        return SimpleNamespace(trace=self._trace)

    def step(self) -> list[int]:
        self.num_steps += 1
        ended = []
        for index in range(len(self._left) if self.num_steps > self.num_ahead else 0):
            is_last = index == len(self._left) - 1
            if self._left[index] and not (is_last and self.num_steps % self._period):
                self._left[index] -= 1
                self.num_tokens += 1
                ended += [] if self._left[index] else [index]
        return ended

    def finish(self, _requests: object) -> None:
        assert all(self._left), "no request ends while turns run"

    def check(self, _request: object, _output: object) -> None:
        pass


@pytest.mark.parametrize(
    ("num_ahead", "period", "trace", "is_whole"),
    [
        (0, 1, None, True),
        (1, 1, None, True),
        (0, 2, None, False),
        (0, 2, "trace", False),
        (1, 2, None, False),
        (1, 2, "trace", True),  # may miss steps; its tokens are counted
    ],
)
def test_a_batch_that_was_divided_is_refused(
    num_ahead: int, period: int, trace: object, *, is_whole: bool
) -> None:
    engine: Any = FakeEngine(num_ahead, period, trace)
    batch = DecodingBatch(engine, [[1, 2], [3, 4], [5, 6]], nothing, 3)
    for _ in range(3):
        batch.run_turn()
    if is_whole:
        assert batch.finish() > 0
        return
    with pytest.raises(BenchmarkError, match="did not run it as one batch"):
        batch.finish()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_is_the_power_by_which_costs_grow_without_those_within_the_noise(power: float) -> None:
    costs = {size: [0.01 * size**power] * 5 for size in (2, 4, 8)} | {1: [0.0001, -0.1, -0.01, 0.1, 0.2]}
    samples = [
        {f"with, {size}": 1.0 + own[repeat] for size, own in costs.items()}
        | {f"without, {size}": 1.0 for size in costs}
        for repeat in range(5)
    ]
    assert growth_power([1, 2, 4, 8], samples) == pytest.approx(power, abs=1e-6)
    assert growth_power([1, 2], samples) is None


class Handler(BaseHTTPRequestHandler):
    """Answers completions: whole ones, or with a token less, or not at all."""

    server: Any

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.fault == "refuse" or self.path != "/v1/completions":
            self.send_error(503 if self.server.fault else 404)
            return
        self.server.bodies.append({**body, "authorization": self.headers["Authorization"]})
        num_tokens = body["max_tokens"] - (self.server.fault == "fall short")
        usage = {"completion_tokens": num_tokens, "prompt_tokens": 32}
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(json.dumps({"usage": usage}).encode())
            return
        token = b'data: {"choices":[{"text":"a"}]}\n\n'
        end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
        self.wfile.write(token * num_tokens + end)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found: Any = server
        found.bodies, found.fault = [], ""
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("backend", [STREAMED, WHOLE])
@pytest.mark.parametrize("fault", ["", "fall short", "refuse"])
def test_whole_answers_are_timed_and_others_end_the_round(server: Any, fault: str, backend: str) -> None:
    server.fault = fault

    def sent(seed: int) -> Any:
        return LoadClient().send(
            f"http://127.0.0.1:{server.server_port}", "secret", backend,
            max_concurrency=2, num_prompts=5, random_input_len=32, random_output_len=3, seed=seed,
        )  # fmt: skip

    if fault:
        with pytest.raises(LoadError, match="must have"):
            sent(1)
        return
    outcome = sent(1)
    assert outcome.request_s > 0
    assert len(outcome.first_s) == 5
    assert all(first > 0 for first in outcome.first_s)
    assert bool(outcome.gaps_s) is (backend == STREAMED)
    for body in server.bodies:
        assert (body["model"], body["authorization"]) == ("bundled", "Bearer secret")
        assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 3)
    sent(2)
    assert len({body["prompt"] for body in server.bodies}) == 10, "rounds differ in prompts"


class FakeSide:
    """Read a value and took so long, or complains."""

    def __init__(self, name: str, value: float, **seconds: float) -> None:
        self.name, self._value = name, value
        self._seconds = {"" if name == "whole" else f" ({name})": took for name, took in seconds.items()}

    def request(self, method: str, *_: Any) -> Any:
        if method == "prepare":
            return [np.array([self._value])]
        if not self._seconds:
            raise NotMeasuredError("Broken: there")
        return self._seconds


def compared(*sides: Any) -> dict[str, tuple[float | None, str]]:
    *_, results = run(Plan([comparison(0, Task("one_value", "one value", SMALL), *sides)]), 3)
    return {row.measure: (row.value, row.note) for row in rows_of([results])}


def test_times_of_the_same_values_are_compared_within_a_repetition() -> None:
    ours = FakeSide(OURS, 1.0, whole=3.0, hooks=1.0)
    peer = FakeSide("peer", 1.0, whole=8.0, hooks=2.0)
    assert compared(ours, peer, None) == {
        "ours / peer": (0.375, ""),
        "ours - ours (hooks), µs": (2e6, ""),
        "peer - peer (hooks), µs": (6e6, ""),
    }
    plain = FakeSide("plain", 1.0, whole=2.0)
    assert [value for value, _ in compared(ours, peer, plain).values()] == [0.375, 1e6, 6e6]
    other = compared(ours, FakeSide("peer", 1.5, whole=1.0, hooks=1.0), None)
    assert {(value, note[:20]) for value, note in other.values()} == {(None, "values differ, by 0.")}
    broken = compared(ours, FakeSide("peer", 1.0), None)
    assert set(broken.values()) == {(None, "Broken: there")}
