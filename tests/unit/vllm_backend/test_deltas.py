"""What is told of a block while it runs: its saves after each step, and what it prints."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nnsight_engine.remote_backend.saved_deltas import DeltaReader
from nnsight_engine.remote_backend.unread_output import Prints
from nnsight_engine.serialization import EncodeError, encode
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.reporting import BlockStdout, Deltas, Reporting


def told(news: Deltas, saves: dict[str, Any], known: DeltaReader) -> int:
    """Tell what is new of ``saves``, and return its size."""
    data = news.changes_in(saves)
    if data is not None:
        known.read(data)
    return len(data or b"")


def test_a_list_that_grows_costs_a_row_a_step() -> None:
    news, known = Deltas(), DeltaReader()
    rows: list[torch.Tensor] = []
    sizes = []
    for step in range(6):
        rows.append(torch.full((200,), float(step)))
        sizes.append(told(news, {"rows": rows, "last": float(rows[-1][0])}, known))
        assert torch.equal(torch.stack(known.whole["rows"]), torch.stack(rows))
        assert known.whole["last"] == float(step)
    assert max(sizes[1:]) <= sizes[0] * 1.1


ITEMS = st.one_of(st.integers(-2, 1000), st.sampled_from(["a", "b", None, 1.5, True]))
CHANGES = st.one_of(
    st.tuples(st.just("grow"), st.lists(ITEMS, max_size=3)),
    st.tuples(st.just("replace"), st.lists(ITEMS, max_size=3)),
    st.tuples(st.just("dict"), st.dictionaries(ITEMS, ITEMS, max_size=4)),
    st.tuples(st.just("set"), st.sets(ITEMS, max_size=4)),
    st.tuples(st.just("tensor"), st.integers(1, 3)),
)


@given(st.lists(CHANGES, min_size=2, max_size=6))
def test_every_change_is_sent(changes: list[tuple[str, Any]]) -> None:
    news, known = Deltas(), DeltaReader()
    saves: dict[str, Any] = {"list": [], "dict": {}, "set": set(), "tensor": torch.zeros(2)}
    for kind, value in changes:
        if kind == "grow":
            saves["list"].extend(value)
        elif kind == "replace":
            saves["list"] = value
        elif kind == "tensor":
            saves["tensor"] += value
        else:
            saves[kind].clear()
            saves[kind].update(value)
        told(news, saves, known)
        plain = {name: value.tolist() if name == "tensor" else value for name, value in saves.items()}
        assert {**known.whole, "tensor": known.whole["tensor"].tolist()} == plain
        assert [*known.whole["dict"]] == [*saves["dict"]], "the order of its keys is part of a dict"
        assert news.changes_in(saves) is None


def test_the_id_of_a_freed_value_says_nothing() -> None:
    news, known = Deltas(), DeltaReader()
    table: dict[str, Any] = {}
    for step in range(50):
        table["a"] = None  # frees the tensor, whose id the next one may have
        table["a"] = torch.full((1,), float(step))
        told(news, {"table": table}, known)
        assert known.whole["table"]["a"].item() == step


def test_objects_of_own_classes_wait_for_the_end_and_run_nothing() -> None:
    class Loud:
        def __reduce_ex__(self, protocol: object) -> Any:
            raise AssertionError("nobody is to write this on the model's thread")

    class Text(str):
        """A string that is more than one."""

    news, known = Deltas(), DeltaReader()
    told(news, {"loud": Loud(), "deep": [[Loud()]], "text": Text("x"), "plain": (1, None)}, known)
    assert known.whole == {"plain": (1, None)}


def test_what_could_not_be_sent_comes_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(value: Any) -> bytes:
        data = encode(value)
        if len(data) > 2500:
            raise EncodeError("too much")
        return data

    monkeypatch.setattr("nnsight_engine.vllm_backend.traces.reporting.encode", limited)
    news, known = Deltas(), DeltaReader()
    rows: list[Any] = [1]
    later: list[list[Any]] = [[2], [torch.zeros(1000)], [3], [4]]
    for step, new in enumerate(later):
        told(news, {"rows": rows, "step": step}, known)
        rows.extend(new)
    assert known.whole == {"rows": [1, 2], "step": 3}, "and neither 3 nor 4 without what is between"
    rows[2] = "short"
    rows = [*rows]
    told(news, {"rows": rows, "step": 4}, known)
    assert known.whole == {"rows": [1, 2, "short", 3, 4], "step": 4}


def test_inference_tensors_are_sent_once() -> None:
    news, known = Deltas(), DeltaReader()
    with torch.inference_mode():
        value = torch.ones(2)
    assert told(news, {"value": value}, known)
    assert known.whole["value"].tolist() == [1.0, 1.0]
    assert news.changes_in({"value": value}) is None


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
    assert prints.take_lines().encode() == b"a\\ud800b\n\xc3\xa9\x00\n"
