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

ENTRY = TraceEntry("trace", 0, 1, b"", [{}], prints=True, sandbox_of=None)


def on_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_only_what_a_blocks_own_thread_writes_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    real = io.StringIO()
    monkeypatch.setattr(sys, "stdout", real)
    reporting = Reporting()
    enter = reporting.open("request", ENTRY)
    stdout = BlockStdout.install()
    assert sys.stdout is stdout

    def block() -> None:
        enter()
        print("mine", 1)  # noqa: T201 - what blocks do
        stdout.writelines(["and ", "this\nhalf"])
        with pytest.raises(TypeError, match="not int"):
            stdout.write(3)

    on_thread(block)
    on_thread(lambda: stdout.write("another's\n"))
    stdout.write("the worker's\n")
    stdout.flush()
    assert stdout.isatty() is False
    assert real.getvalue() == "another's\nthe worker's\n"
    assert reporting.report("request", ENTRY, dict) == ("trace", 0, None, "mine 1\nand this\n")
    assert reporting.report("request", ENTRY, dict) is None
    reporting.close("request", "trace")
    assert reporting.take_remaining("trace") == ("half", ""), "lines are sent when they are complete"
    assert len(reporting) == 0


def test_text_that_is_no_unicode_travels_and_a_class_of_its_own_runs_no_code() -> None:
    class Text(str):
        def encode(self, *_: Any) -> bytes:
            raise AssertionError("nobody calls this")

    prints = Prints()
    prints.write("a\ud800b\n")
    prints.write(Text("é\x00\n"))
    assert prints.take().encode() == b"a\\ud800b\n\xc3\xa9\x00\n"
