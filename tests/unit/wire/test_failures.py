"""An error that happened there reads, and is caught, as if it had happened here."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.wire import DecodeError, decode, encode, encode_error, restore_error


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

    assert "cannot be had" in str(travelled(MuteError(object())))


@pytest.mark.parametrize(
    "plain", [None, [], {"name": 1}, {**encode_error(ValueError("x")), "entries": [{"file": 1}]}]
)
def test_what_describes_no_error_is_refused(plain: Any) -> None:
    with pytest.raises(DecodeError, match="describes no error"):
        restore_error(plain)


def test_hostile_descriptions_make_harmless_errors() -> None:
    entry = {
        "file": "a\0b",
        "line": 10**12,
        "name": "x\ny",
        "end_line": -5,
        "column": 10**9,
        "end_column": -1,
    }
    plain = {
        **encode_error(ValueError("x")),
        "module": "os",
        "name": "system",
        "bases": ["exec"],
        "entries": [entry],
    }
    restored = restore_error(plain)
    assert isinstance(restored, RuntimeError)
    assert traceback.format_exception(restored)
    deep: dict[str, Any] = encode_error(ValueError("x"))
    for _ in range(50):
        deep = {**encode_error(ValueError("x")), "cause": deep}
    assert isinstance(restore_error(deep), ValueError)
