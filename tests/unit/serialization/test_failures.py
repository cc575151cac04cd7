"""An error that happened there reads, and is caught, as if it had happened here."""

from __future__ import annotations

import json
import linecache
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.serialization import TRUSTED, DecodeError, decode, encode, encode_error, restore_error
from nnsight_engine.tracing.tracer import Tracer


class OwnError(ValueError):
    """Takes arguments that no one else knows, and says something else."""

    def __init__(self, place: str, *, at: int) -> None:
        super().__init__(place)
        self.at = at

    def __str__(self) -> str:
        return f"own, at {self.at}"


def failing() -> None:
    try:
        1 / 0  # noqa: B018 - fails
    except ZeroDivisionError as error:
        raise OwnError("here", at=3) from error


def raised(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("it should have failed")


def travelled(error: BaseException) -> BaseException:
    plain = encode_error(error)
    assert decode(encode(plain)) == json.loads(json.dumps(plain)) == plain
    return restore_error(plain)


def test_the_remote_lines_are_in_the_traceback_with_cause_and_notes() -> None:
    error = raised(failing)
    error.add_note("and a note")
    shown = "".join(traceback.format_exception(travelled(error)))
    assert shown == "".join(traceback.format_exception(error))  # files, lines, names, text and carets
    assert shown.endswith("OwnError: own, at 3\nand a note\n")


def test_an_unknown_type_keeps_its_name_and_is_caught_as_its_base() -> None:
    restored = travelled(raised(failing))
    with pytest.raises(ValueError, match="own, at 3") as caught:
        raise restored
    assert type(caught.value).__name__ == "OwnError"
    assert caught.value.at == 3  # type: ignore[attr-defined] # carried over
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a"),
        FileNotFoundError(2, "no such file"),
        StopIteration(3),
        AttributeError("no such", name="thing"),
        InterventionError("code", "the message"),
        IndexError(),
    ],
)
def test_known_types_come_back_as_themselves(error: BaseException) -> None:
    restored = travelled(error)
    assert type(restored) is type(error)
    assert str(restored) == str(error)
    assert vars(restored) == vars(error)


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"),
        ExceptionGroup("g", [ValueError()]),
    ],
)
def test_what_cannot_be_made_or_would_end_the_client_comes_as_a_namesake(error: BaseException) -> None:
    restored = travelled(error)
    assert isinstance(restored, Exception)
    assert type(restored).__name__ == type(error).__name__
    assert str(restored) == str(error)


def test_a_name_error_still_suggests() -> None:
    restored = travelled(raised(lambda: undefined_name))  # type: ignore[name-defined] # noqa: F821 - so it is
    assert isinstance(restored, NameError)
    assert restored.name == "undefined_name"


def test_an_error_that_cannot_say_what_it_is() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "is not available" in str(travelled(MuteError(object())))


@pytest.mark.parametrize(
    "plain", [None, [], {"name": 1}, {**encode_error(ValueError("x")), "entries": [{"file": 1}]}]
)
def test_what_describes_no_error_is_refused(plain: Any) -> None:
    with pytest.raises(DecodeError, match="describes no error"):
        restore_error(plain)


def entry(**changes: Any) -> dict[str, Any]:
    return {"file": "a.py", "line": 3, "name": "f", "source": "x", **changes}


def caused(depth: int) -> dict[str, Any]:
    return {"cause": {**encode_error(ValueError()), **caused(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a\0b"},
        {"name": "a\ud800b"},
        {"name": "a\ud800b", "module": "m\ud800"},
        {"name": "X", "notes": ["n"], "attributes": {"add_note": 1, "with_traceback": 2, "__class__": 3}},
        {"notes": ["n\ud800"], "attributes": {"add_note": 1, "with_traceback": 2}},
        {"entries": [entry(column=5, end_column=3)]},
        {"entries": [entry(column=5, end_column=3, end_line=4)]},
        {"entries": [entry(column=-5, end_column=3)]},
        {"entries": [entry(name="f\0\ud800", file="a\0\ud800", source="\ud800\0")]},
        {"entries": [entry(line=-(10**30), end_line=10**30, column=10**30, end_column=-(10**30))]},
        {"module": "os", "name": "system", "bases": ["exec"]},
        caused(50),
    ],
)
def test_any_description_of_the_right_types_makes_an_error(changes: dict[str, Any]) -> None:
    restored = restore_error({**encode_error(ValueError("x")), **changes})
    assert isinstance(restored, RuntimeError if "bases" in changes else ValueError)
    assert traceback.format_exception(restored)


@pytest.mark.parametrize("name", ["onnx", "_lazy", "ops"])
def test_an_errors_type_is_looked_up_without_running_a_module(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    monkeypatch.delitem(vars(torch), name, raising=False)
    restore_error({**encode_error(ValueError("x")), "module": "torch", "name": name})
    assert not asked


def from_file(text: str, file: str) -> Any:
    """Return a function that arrived, and that its sender says stands in this file."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), namespace)
    data = encode(namespace["fails"])
    del linecache.cache[file]
    return decode(data, policy=TRUSTED)


def last_entry(error: BaseException) -> tuple[Any, ...]:
    entry = encode_error(error)["entries"][-1]
    return entry["file"], entry["line"], entry["name"], entry["source"].strip()


def test_no_file_of_this_machine_is_read_because_a_sender_names_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password\n" * 5)
    error = raised(from_file("def fails():\n    return 1 / 0\n", str(secret)))
    assert last_entry(error) == (str(secret), 2, "fails", "return 1 / 0")
    told = {**encode_error(error), "entries": [{"file": str(secret), "line": 1, "name": "f"}]}
    assert last_entry(restore_error(told)) == (str(secret), 1, "f", "")


def test_two_senders_with_one_file_name_see_their_own_lines() -> None:
    first = from_file("def fails():\n    return 1 / 0\n", "<notebook 1>")
    second = from_file("def fails():\n    password = 'second'; return {}[password]\n", "<notebook 1>")
    assert last_entry(raised(first))[-1] == "return 1 / 0"
    assert last_entry(raised(second))[-1] == "password = 'second'; return {}[password]"
    told = encode_error(raised(first))
    restored = restore_error(told)
    restore_error(encode_error(raised(second)))
    assert encode_error(restored)["entries"] == told["entries"]


def test_a_function_that_came_along_traces_with_its_own_text(tmp_path: Path) -> None:
    file = tmp_path / "helper.py"
    text = "def fails(tracer, seen):\n    with tracer:\n        seen.append('own')\n"
    arrived = from_file(text, str(file))
    file.write_text(text.replace("own", "of a file"))
    seen: list[str] = []
    arrived(Tracer(), seen)
    assert seen == ["own"]
