"""The log: lines that programs read, whose request each is of, and nothing that clients have sent."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Scope
from app.observability.logs import start_logs
from app.settings import Settings
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import Serve
from tests.integration.tenants import Tenants

SECRET = "swordfish"
NUMBER = 31415.92653


class Log:
    """What was written since."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Everything that is logged, from ``DEBUG`` on, as JSON."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "")
    for name in ("app", "nnsight_engine", "uvicorn", "uvicorn.error"):
        # Servers of other tests may have had uvicorn's own configuration; and later ones get theirs back.
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(logging.getLogger("app.requests"), "filters", [])
    start_logs(Settings(log_format="json", log_level="DEBUG"))
    yield Log(stream)
    root.handlers[:] = handlers
    monkeypatch.undo()
    root.setLevel(level)  # which also clears what loggers remember of levels
    logging.captureWarnings(False)


async def test_each_request_has_a_line_with_whose_it_was(log: Log, tenants: Tenants) -> None:
    headers = await tenants.headers("acme")
    body = {"prompt": "a", "interventions": [{"op": "logit_lens"}]}
    answer = await tenants.send("POST", "/v1/completions", headers, json=body)
    (line,) = [line for line in log.lines if line["event"] == "request"]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["tenant"] == "acme"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["outcome"], line["operations"], line["level"]) == ("ok", ["logit_lens"], "info")
    assert line["duration_s"] > 0


async def test_what_is_logged_within_a_request_names_it_and_not_another(log: Log, serve: Serve) -> None:
    async with serve(FakeBehaviour(error=RuntimeError("broken"))) as server:
        answers = await asyncio.gather(*(server.complete() for _ in range(4)))
    errors = [line for line in log.lines if line["level"] == "error"]
    assert {line["request_id"] for line in errors} == {one.headers["x-request-id"] for one in answers}
    assert len(errors) == len(answers)
    assert errors[0]["exception"][0]["exc_value"] == "broken"


async def test_nothing_that_clients_send_is_logged(log: Log, tenants: Tenants) -> None:
    headers = await tenants.headers("acme", Scope.COMPLETIONS, Scope.INTERVENTIONS, Scope.CODE)
    key = headers["authorization"].removeprefix("Bearer ")
    steer = {"op": "steer", "at": "layers.1.output", "vector": [NUMBER] * 8}
    code = {"op": "trace", "code": f"x = '{SECRET}'"}
    bodies: list[Any] = [
        {"prompt": SECRET, "interventions": [steer]},
        {"prompt": SECRET, "stream": True},
        {"prompt": SECRET, "n": SECRET},
        {"prompt": SECRET, "interventions": [{**steer, "at": SECRET}]},
        {"prompt": SECRET, "interventions": [code]},
        {"prompt": {SECRET: SECRET}},
    ]
    behaviour = tenants.server.engine.behaviour
    failures = [None, ApiError(ErrorCode.ENGINE_CAPTURE_FULL, "full"), RuntimeError("broken")]
    for failure in failures:
        behaviour.error = behaviour.stream_error = failure
        for body in bodies:
            await tenants.send("POST", "/v1/completions", headers, json=body)
            chat = {**body, "messages": [{"role": "user", "content": SECRET}]}
            await tenants.send("POST", "/v1/chat/completions", headers, json=chat)
    await tenants.send("POST", "/v1/completions", headers, content=f'{{"prompt": "{SECRET}'.encode())
    await tenants.send("POST", "/v1/traces", {**headers, "content-type": "text/plain"}, content=b"swordfish")
    await tenants.send("POST", "/v1/completions", {"authorization": f"Bearer {key}x{SECRET}"}, json=bodies[0])
    await tenants.send("GET", f"/v1/models?{SECRET}", headers)
    assert len([line for line in log.lines if line["event"] == "request"]) == 3 * 2 * len(bodies) + 4
    for secret in (SECRET, key, str(NUMBER)):
        assert secret not in log.text


def test_uvicorn_s_and_other_loggers_go_the_same_way(log: Log) -> None:
    # Ray and vLLM give every record of the process fields of their own.
    foreign = {"color_message": "\x1b[1mone", "_ray_timestamp_ns": 1, "vllm_process_name": "APIServer"}
    said = {"msg": "one %s", "args": ("two",), "levelno": logging.WARNING, "levelname": "WARNING"}
    record = logging.makeLogRecord({"name": "uvicorn.error", **said, "url": "http://here", **foreign})
    logging.getLogger("uvicorn.error").handle(record)
    (line,) = log.lines
    assert line.pop("timestamp")
    assert line == {
        "event": "one two", "logger": "uvicorn.error", "level": "warning", "url": "http://here",
    }  # fmt: skip


@pytest.mark.parametrize(("chosen", "is_terminal", "as_json"), [
    (None, True, False), (None, False, True), ("json", True, True), ("text", False, False),
])  # fmt: skip
def test_a_terminal_gets_text_by_default(
    monkeypatch: pytest.MonkeyPatch, log: Log, chosen: str | None, *, is_terminal: bool, as_json: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", log.stream)  # which pytest has put back since
    monkeypatch.setattr(log.stream, "isatty", lambda: is_terminal)
    start_logs(Settings.model_validate({"log_format": chosen}))
    logging.getLogger("app").warning("said")
    assert log.text.startswith("{") is as_json
    assert "said" in log.text
