"""Clients of other Python versions: what they send is read here, or refused with both versions and the line.

Their messages are those of this version with another one in the head, and with other text in their sources.
"""

# ruff: noqa: F841 - a block's variables are looked at where it runs

from __future__ import annotations

import enum
import pathlib
import subprocess
import sys
import typing
from typing import Any

import pytest

from nnsight_engine.core.closure_cells import content
from nnsight_engine.serialization import (
    DATA_ONLY,
    TRUSTED,
    DecodeError,
    MessageLimits,
    Policy,
    decode,
    decode_trace,
    encode,
    encode_trace,
)
from nnsight_engine.serialization.message import NodeKind, NodeTable, pack
from nnsight_engine.tracing.tracer import Tracer
from tests.unit.serialization.recording import Recorder

HERE = sys.version_info.minor
OTHER = HERE + 1
VERSIONS = [0, 11, 12, 13, 14]


def sent_by(python: int, data: bytes, *replaced: tuple[bytes, bytes]) -> bytes:
    """Return the message as another version would have sent it; replacements keep the sizes."""
    data = data[:7] + bytes([python]) + data[8:]
    for before, after in replaced:
        assert len(before) == len(after)
        assert before in data
        data = data.replace(before, after)
    return data


def largest(values: list[Any], _: int = 0) -> Any:
    return max(values)


class Held:
    """Something."""

    size = 1


@pytest.mark.parametrize("python", VERSIONS)
def test_a_trace_of_any_version_runs_here(python: int) -> None:
    held, path = Held(), pathlib.Path("/a/b")
    with Recorder() as recorder:
        result = [largest([held.size, step]) for step in range(3)]
        named = path.name
    (info,) = decode_trace(sent_by(python, encode_trace([recorder.kept]))).blocks
    Tracer().compile_on(info)()
    assert content(info.variables["result"]) == [1, 1, 2]
    assert content(info.variables["named"]) == "b"


def test_messages_say_which_version_sent_them() -> None:
    assert encode(1)[7] == HERE


def test_newer_syntax_is_named_with_its_line_and_both_versions() -> None:
    with Recorder() as recorder:
        values = [1]
        result = "a" + "bbbbbbb"
    data = encode_trace([recorder.kept])
    newer = sent_by(OTHER, data, (b'"a" + "bbbbbbb"', b'f"{"a" : "bbb"}'))
    line = recorder.kept.info.block.line + 1
    with pytest.raises(DecodeError) as caught:
        decode_trace(newer)
    told = str(caught.value)
    assert f"test_versions.py, line {line}: `result = f" in told
    assert f"sent by Python 3.{OTHER}, and this side runs Python 3.{HERE}" in told
    with pytest.raises(DecodeError) as caught:
        decode_trace(sent_by(HERE, newer))
    assert "Python 3." not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (
            largest,
            b"largest(values: list[Any], _: int = 0)",
            b"largest[T, *Ts](values: list[Any], _=[0])"[:38],
        ),
        (Held, b"class Held:\n", b"class H[T]:\n"),
        (lambda value: value + 1, b"value + 1", b"value 2 1"),
    ],
    ids=["function", "class", "lambda"],
)
def test_functions_and_classes_too(value: Any, before: bytes, after: bytes) -> None:
    data = sent_by(OTHER, encode(value), (before, after))
    with pytest.raises(DecodeError, match=rf"cannot be compiled.*line \d+: `.*3\.{OTHER}, and this side"):
        decode(data, policy=TRUSTED)


def test_what_this_versions_library_lacks_is_named_with_both_versions() -> None:
    for before, after in ((b"decimal:Decimal", b"decimax:Decimal"), (b"decimal:Decimal", b"decimal:Decimax")):
        data = sent_by(OTHER, encode(typing.cast("Any", __import__("decimal")).Decimal(1)), (before, after))
        with pytest.raises(DecodeError, match=rf"decima.*sent by Python 3\.{OTHER}"):
            decode(data, policy=TRUSTED)


def test_names_that_one_version_has_elsewhere_are_found() -> None:
    moved = NodeTable([NodeKind.NAME], [[]], ["pathlib._local:PurePosixPath"], {}, python=13)
    for policy in (TRUSTED, DATA_ONLY):
        assert decode(b"".join(pack(moved, MessageLimits())), policy=policy) is pathlib.PurePosixPath
    asked: list[str] = []

    def may_import(module: str, _name: str) -> bool:
        asked.append(module)
        return True

    decode(b"".join(pack(moved, MessageLimits())), policy=Policy(may_import))
    assert asked == ["pathlib"]


def test_a_feature_from_the_future_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sent_by(OTHER, encode(largest))
    monkeypatch.setattr("nnsight_engine.serialization.scopes.FUTURE_FLAGS", 0)
    with pytest.raises(DecodeError, match=rf"largest.*__future__.*Python 3\.{HERE}"):
        decode(data, policy=TRUSTED)


LAMBDAS = """
import sys
from nnsight_engine.serialization import TRUSTED, decode, encode
two = [lambda: 5, lambda: 6, lambda: (7, lambda: 8)]
five, six, seven = (decode(encode(one), policy=TRUSTED) for one in two)
assert (five(), six(), seven()[0], seven()[1]()) == (5, 6, 7, 8), (five(), six())
"""


def test_lambdas_on_a_line_are_distinguished_without_positions(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "lambdas.py"
    script.write_text(LAMBDAS)
    project = str(pathlib.Path(__file__).resolve().parents[3])
    subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", str(script)], check=True, env={"PYTHONPATH": project}
    )


class Flag(enum.Flag):
    A = 1
    B = 2


def test_an_enum_named_as_its_base_is_itself() -> None:
    both = decode(encode(Flag.A | Flag.B), policy=TRUSTED)
    assert (type(both).__module__, both.value) == (__name__, 3)


def test_type_variables_keep_their_variance() -> None:
    variable = typing.TypeVar("variable", covariant=True)
    made = decode(encode(variable), policy=TRUSTED)
    assert (made.__covariant__, made.__contravariant__) == (True, False)
