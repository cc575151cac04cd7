"""What vLLM logs of requests has no content, however it is given to the logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nnsight_engine.vllm_backend.content_logs import redact_content

SECRET = "my diary"
READERS = [
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.v1.structured_output",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.v1.engine.core",
    "vllm.renderers.hf",
    "vllm.tool_parsers.hermes_tool_parser",
]


@pytest.fixture(autouse=True)
def _without_content() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)  # whatever other tests of this process have set
    redact_content()
    once = logging.getLogRecordFactory()
    redact_content()
    assert logging.getLogRecordFactory() is once, "not idempotent"
    yield
    logging.setLogRecordFactory(before)


class Quoting:
    def __repr__(self) -> str:
        return SECRET


class InvalidValue(dict[str, str]):
    def __len__(self) -> int:
        raise RuntimeError(SECRET)


@pytest.mark.parametrize("name", READERS)
def test_arguments_are_counted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    cases: list[tuple[Any, str]] = [
        (SECRET, "<8 characters>"),
        (SECRET.encode(), "<8 characters>"),
        (ValueError(SECRET), "<ValueError>"),
        ([SECRET], "<1 values>"),
        ({SECRET}, "<1 values>"),
        (Quoting(), "<Quoting>"),
        (f"cmpl-{SECRET}", "<13 characters>"),
        ("cmpl-8a7f-0", "cmpl-8a7f-0"),
        ("chatcmpl-8a7f", "chatcmpl-8a7f"),
        (7, "7"),
        (None, "None"),
    ]
    for argument, left in cases:
        caplog.clear()
        logging.getLogger(name).error("refused: %s", argument)
        logging.getLogger(name).error("refused: %(one)s", {"one": argument})
        assert [record.getMessage() for record in caplog.records] == [f"refused: {left}"] * 2
        assert SECRET not in caplog.text


def test_an_error_is_its_type_and_place(caplog: pytest.LogCaptureFixture) -> None:
    try:
        int(SECRET)
    except ValueError as error:
        logging.getLogger(READERS[0]).exception("failed at %s", SECRET)
        logging.getLogger(READERS[0]).error("%s", error, exc_info=error)  # noqa: TRY400 - as libraries may write it
    assert SECRET not in caplog.text
    for record in caplog.records:
        assert "ValueError at " in record.getMessage()
        assert __file__ in record.getMessage()


@pytest.mark.parametrize("exc_info", [None, ValueError(SECRET)], ids=ascii)
@pytest.mark.parametrize(
    ("template", "args", "left"),
    [
        ("%d tokens", (SECRET,), "%d tokens (arguments left out)"),
        ("%.2f%% of %x", (SECRET, SECRET), "%.2f%% of %x (arguments left out)"),
        ("%s and %s", (SECRET,), "%s and %s (arguments left out)"),
        ("no place", (SECRET,), "no place (arguments left out)"),
        ("%(one)s", ({"two": SECRET},), "%(one)s (arguments left out)"),
        ("%s", (InvalidValue(a=SECRET), 1), "%s (arguments left out)"),
        ("100 %", (), "100 %"),
        (ValueError(SECRET), (), "<ValueError>"),
    ],
    ids=ascii,
)
def test_a_line_whose_arguments_do_not_fit_is_logged_without_them(
    template: Any, args: tuple[Any, ...], left: str, exc_info: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger(READERS[0]).error(template, *args, exc_info=exc_info)
    (record,) = caplog.records
    assert record.getMessage() == left + (" ValueError" if exc_info else "")
    assert SECRET not in caplog.text


def test_a_token_is_content_and_its_request_is_none(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm.v1.structured_output").error("token %s for request %s rejected", 7042, "cmpl-1-0")
    assert caplog.records[0].getMessage() == "a token for request cmpl-1-0 rejected"


@pytest.mark.parametrize("name", ["vllm.config", "vllm.v1.worker.gpu_worker", "app.requests", "vllm"])
def test_other_lines_are_as_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger(name).error("loads %s", "a model")
    assert caplog.records[0].getMessage() == "loads a model"
