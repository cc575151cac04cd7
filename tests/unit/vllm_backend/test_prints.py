"""What blocks print goes to their senders, whatever it is, and nobody else's output does."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nnsight_engine.remote_backend.prints import Prints
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.prints import BlockStdout
from nnsight_engine.vllm_backend.traces.reporting import Reporting


def on_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def instead(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Put another ``sys.stdout`` in; in a test's body, since pytest puts its own in before that."""
    real = io.StringIO()
    monkeypatch.setattr(sys, "stdout", real)
    return real


def entry(**options: Any) -> TraceEntry:
    return TraceEntry("trace", 0, 1, b"", [{}], prints=True, sandbox_of=None, **options)


def test_only_what_a_blocks_own_thread_writes_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    real = instead(monkeypatch)
    reporting = Reporting()
    enter = reporting.open("request", entry())

    def block() -> None:
        enter()
        print("mine", 1)  # noqa: T201 - what blocks do
        sys.stdout.writelines(["and ", "this\n"])

    on_thread(block)
    on_thread(lambda: sys.stdout.write("another's\n"))
    sys.stdout.write("the worker's\n")
    assert real.getvalue() == "another's\nthe worker's\n"
    assert reporting.report("request", entry(), dict) == ("trace", 0, None, "mine 1\nand this\n")
    assert reporting.report("request", entry(), dict) is None


def test_complete_lines_are_sent_at_once_and_the_rest_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch)
    reporting = Reporting()
    enter = reporting.open("request", entry())

    def block() -> None:
        enter()
        sys.stdout.write("whole\nhalf")

    on_thread(block)
    told = reporting.report("request", entry(), dict)
    assert told is not None
    assert told[3] == "whole\n"
    reporting.close("request", "trace")
    assert reporting.take_remaining("trace") == ("half", "")
    assert len(reporting) == 0


def test_too_much_is_cut_and_says_so() -> None:
    prints = Prints(max_bytes=10)
    for _ in range(5):
        prints.write("12345678\n")
    text = prints.take(everything=True)
    assert text.startswith("12345678\n1\n[the block printed more than 10 bytes")
    prints.write("more")
    assert prints.take(everything=True) == ""


def test_text_that_is_no_unicode_can_travel_all_the_same() -> None:
    prints = Prints()
    prints.write("a\ud800b\n")
    prints.write("é\x00\n")
    assert prints.take().encode() == b"a\\ud800b\n\xc3\xa9\x00\n"


def test_a_string_of_a_class_of_its_own_runs_no_code_of_it() -> None:
    class Text(str):
        def encode(self, *_: Any) -> bytes:
            raise AssertionError("nobody calls this")

    prints = Prints()
    prints.write(Text("x\n"))
    assert prints.take() == "x\n"


def test_the_stand_in_is_like_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = instead(monkeypatch)
    stdout = BlockStdout.install()
    assert BlockStdout.install() is stdout
    assert sys.stdout.isatty() is False
    sys.stdout.write("x")
    sys.stdout.flush()
    assert real.getvalue() == "x"

    def block() -> None:
        stdout.enter(Prints())
        with pytest.raises(TypeError, match="not int"):
            sys.stdout.write(3)  # type: ignore[arg-type] # as a block may

    on_thread(block)
