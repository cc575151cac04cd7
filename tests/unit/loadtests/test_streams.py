"""What a load test takes for a token: text, not bytes; and what it takes for a whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtests.streams import Stream


def event(text: str | None = None, **rest: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "logprobs": None, "interventions": {}}]
    return f"data: {json.dumps({'id': 'one', 'choices': choices, **rest})}\n".encode()


def usage(num_tokens: int) -> bytes:
    return event(usage={"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": num_tokens + 3})


def read(*lines: tuple[float, bytes]) -> Stream:
    stream = Stream(began=10.0)
    for now, line in lines:
        stream.take(line, now)
    return stream


DONE = b"data: [DONE]\r\n"


def test_the_first_token_is_the_first_text_and_not_the_first_byte() -> None:
    stream = read(
        (10.1, b": hello\n"), (10.2, b"\n"), (10.3, event("")), (10.5, event(" a")), (10.6, event(" b")),
        (10.65, event("")), (10.9, event(" c")), (11, usage(5)), (11, DONE),
    )  # fmt: skip
    assert stream.first_s == pytest.approx(0.5)
    assert stream.gaps_s == pytest.approx([0.1, 0.3])
    assert stream.num_tokens == 5
    assert stream.failure() == ""


def test_a_stream_that_breaks_off_is_a_failure() -> None:
    assert read((11, event(" a")), (11, usage(1))).failure() == "the stream ended early"


def test_a_stream_that_ends_with_an_error_is_a_failure_by_its_code() -> None:
    error = b'data: {"error": {"message": "no", "code": "trace_failed"}}\n'
    assert (
        read((11, event(" a")), (11, b"event: error\n"), (12, error), (12, DONE)).failure() == "trace_failed"
    )


def test_a_stream_without_a_token_is_a_failure() -> None:
    assert read((11, event("")), (11, usage(0)), (11, DONE)).failure() == "the stream had no token"
