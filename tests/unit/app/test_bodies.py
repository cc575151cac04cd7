"""Bodies: read within bounds, large ones in processes, refused with the field, answered as JSON."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.errors import ApiError, ErrorCode
from app.formats import uploads
from app.formats.json_bodies import FieldLimits, checked, exceeds_depth, parse_object
from app.formats.json_text import json_text
from app.http import body_process
from app.http.large_bodies import LargeBodyReader
from app.limits.limit import Limit
from app.process_environment import environment_for_traces
from tests.child_processes import children_running
from tests.waiting import wait_for_async

MAX_DEPTH = 4

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{}\n\u2200'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k"\\[]{'), inner, max_size=4)
    ),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(inner) for inner in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(inner) for inner in value), default=0)
    return 0


@given(json_values, st.booleans())
def test_depth_is_counted_as_a_parser_would(value: object, ascii_only: bool):
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert exceeds_depth(body, MAX_DEPTH) == (depth_of(value) > MAX_DEPTH)


def test_depth_is_counted_across_chunks():
    padding = json.dumps("[" * 3_000_000)
    deep = f"[{padding},[[[{padding}]]]]".encode()
    assert not exceeds_depth(deep, 4)
    assert exceeds_depth(deep, 3)


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '"a\\uDFFFb"', '"\\udc00\\ud800"', '{"\\ud83d": 1}', '["\\ud83d\\ud83d\\ude00"]']
)
def test_half_of_a_character_is_refused_wherever_it_stands(text: str) -> None:
    with pytest.raises(ApiError, match="lone surrogate") as caught:
        parse_object(f'{{"b": "whole", "a": [{text}]}}'.encode())
    assert (caught.value.code, caught.value.param) == ("invalid_json", "a")


def test_a_character_of_two_escapes_is_whole() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}') == {"a": "\U0001f600", "b": "\\ud800"}


LIMITS = FieldLimits(max_depth=64, max_objects=10, max_values=3000, max_prompt_ids=5000)


def numbers_of(tensor: dict[str, Any]) -> np.ndarray[Any, Any]:
    assert tensor["dtype"] == "float32"
    assert tensor["encoding"] == "base64"
    return np.frombuffer(base64.b64decode(tensor["data"]), "<f4").reshape(tensor["shape"])


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"tools": [{}] * 10}, "invalid_value", "tools"),
        ({"a": {"b": [[[] for _ in range(9)]]}}, "invalid_value", "a"),
        ({"stop": ["a"] * 3001}, "invalid_value", "stop"),
        ({"logit_bias": {str(i): 0 for i in range(3001)}}, "invalid_value", "logit_bias"),
        ({"prompt": [1] * 5001}, "invalid_value", "prompt"),
        ({"prompt": [[1] * 1001] * 5}, "invalid_value", "prompt"),
        ({"interventions": [{"vector": [1.0] * 2000 + ["a"]}]}, "invalid_value", "interventions.0.vector"),
        ({"interventions": [{"vector": [1.0] * 2000 + [True]}]}, "invalid_value", "interventions.0.vector"),
        ({"interventions": [{"vector": [1e39] * 2000}]}, "not_finite", "interventions.0.vector"),
        ({"interventions": [{"vector": [10**400] * 2000}]}, "not_finite", "interventions.0.vector"),
        ({"interventions": [{"where": {"positions": [1] * 3001}}]}, "invalid_value", "interventions"),
        ({"values": [[1.0] * 20] * 200 + [[1.0]]}, "invalid_value", "values"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_with_its_field(
    body: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(ApiError) as raised:
        checked(body, LIMITS)
    assert (raised.value.code, raised.value.param) == (code, field)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * 100_000, "n": 1},
        {"prompt": [1] * 5000},
        {"stop": ["a"] * 3000},
        {"tools": [{}] * 9},
        {"interventions": [{"vector": [1.0] * 1023, "where": {"positions": [1] * 1500}}]},
        {"vector": [1.0] * 3000},
        {"interventions": "a", "values": 5, "vectors": None},
        {"values": [[], [1], []]},
    ],
)
def test_what_is_within_them_stays_as_it_is(body: dict[str, Any]) -> None:
    assert checked(dict(body), LIMITS) == body


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8), st.data()
)
def test_tensors_keep_their_numbers_and_their_shape(some: list[float], data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2048,), (2, 1024), (256, 8), (2, 4, 256), (1, 1, 1024)]))
    right = np.resize(np.array(some, np.float64), shape)
    where = data.draw(st.sampled_from(["vector", "values", "weights"]))
    given_ = {"interventions": [{"op": "steer", where: right.tolist()}], "values": right.tolist()}
    body = checked({**given_, "vectors": {"layers.0.output": right.tolist()}}, LIMITS)
    for tensor in (body["interventions"][0][where], body["values"], body["vectors"]["layers.0.output"]):
        found = numbers_of(tensor)
        assert found.shape == right.shape
        assert (found == right.astype(np.float32)).all()


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def refuse(name: str) -> None:
    raise AssertionError(name)


@given(VALUES)
def test_every_value_is_json_that_utf_8_can_hold(value: Any) -> None:
    json.loads(json_text(value).encode("utf-8"), parse_constant=refuse)


@given(st.recursive(st.integers() | st.text(st.characters(exclude_categories=["Cs"])), st.lists))
def test_what_json_has_is_as_it_was(value: Any) -> None:
    assert json.loads(json_text(value)) == value


TYPE = "multipart/form-data; boundary=x"
FILE = '--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n'


def parts_of(body: bytes, content_type: str) -> tuple[dict[str, str], tuple[str, bytes]]:
    return uploads.read_form(body, content_type, ("name", "at", "shared"), "a vector")


def field(name: str, value: str) -> str:
    return f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (FILE + field("name", "a") * 2, "each once; got 'name'"),
        (FILE + field("other", "a"), "got 'other'"),
        (FILE + field("at", "a" * 100_000), "at most 65536 bytes; at has 100000"),
        (FILE * 2, "has one file"),
    ],
)
def test_too_many_fields_and_too_long_ones_are_refused(body: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parts_of(f"{body}--x--\r\n".encode(), TYPE)
    assert caught.value.code is ErrorCode.BAD_REQUEST


LARGE_LIMITS = FieldLimits(max_depth=16, max_objects=1000, max_values=1000, max_prompt_ids=1000)


class Slow(LargeBodyReader):
    """Reads nothing before it may.

    Attributes:
        reading: How many bodies of each first byte are being read.
    """

    def __init__(self) -> None:
        super().__init__(LARGE_LIMITS, {}, Limit("bodies", 2, 0.5))
        self.reading: Counter[bytes] = Counter()
        self.may_end = asyncio.Event()

    async def _parse_in_process(self, body: bytes | bytearray) -> tuple[bool, bytes]:
        self.reading[bytes(body)] += 1
        await self.may_end.wait()
        return True, b"{}"


async def test_a_tenant_cannot_have_all_processes():
    bodies = Slow()
    flood = [asyncio.create_task(bodies.read(b"flood", "flood")) for _ in range(5)]
    await wait_for_async(lambda: bodies.reading[b"flood"] == 1)
    other = asyncio.create_task(bodies.read(b"other", "other"))
    await wait_for_async(lambda: bodies.reading[b"other"] == 1)
    assert bodies.reading[b"flood"] == 1
    bodies.may_end.set()
    assert await asyncio.gather(*flood, other) == [{}] * 6


async def test_without_keys_all_processes_are_anybodys():
    bodies = Slow()
    reading = [asyncio.create_task(bodies.read(b"any")) for _ in range(3)]
    await wait_for_async(lambda: bodies.reading[b"any"] == 2)
    bodies.may_end.set()
    assert await asyncio.gather(*reading) == [{}] * 3


def processes() -> list[psutil.Process]:
    """Return the processes that read bodies."""
    return children_running(body_process.__name__)


def peak_bytes(pid: int | None) -> int:
    """Return the most address space that a process has had."""
    found = re.search(r"VmPeak:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
async def bodies() -> AsyncIterator[LargeBodyReader]:
    made = LargeBodyReader(LARGE_LIMITS, environment_for_traces(), Limit("bodies", 2))
    yield made
    await made.close()


async def test_an_idle_process_that_has_died_costs_the_next_body_nothing(bodies: LargeBodyReader):
    assert await bodies.read(b'{"a": 1}') == {"a": 1}
    (process,) = processes()
    os.kill(process.pid, signal.SIGKILL)
    assert await bodies.read(b'{"a": 2}') == {"a": 2}
    (other,) = processes()
    assert other.pid != process.pid


ROWS = [[0] * 1000] * 1000
DENSE: dict[str, tuple[Any, bool]] = {
    "objects": ({"x": [{}] * 100_000}, False),
    "nested": ({"x": [[[[[[]]]]]] * 100_000}, False),
    "very many": ({"x": [[[[[[]]]]]] * 500_000}, False),
    "texts": ({"x": ["ab"] * 100_000}, False),
    "floats": ({"x": [1.5] * 100_000}, False),
    "members": ({"x": {f"{number:x}": 0 for number in range(100_000)}}, False),
    "tensor": ({"vectors": {"a": ROWS}}, True),
    "tensor of rows": ({"vectors": {"a": [[0.5] * 2] * 200_000}}, True),
    "text": ({"prompt": "\N{GRINNING FACE}" + "a" * 4_000_000}, True),
}


@pytest.mark.skipif(sys.platform != "linux", reason="where memory is read is Linux's")
async def test_what_a_request_may_hold_is_read_in_little_memory_and_what_is_more_is_refused(
    bodies: LargeBodyReader,
):
    texts = {
        name: json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
        for name, (value, _) in DENSE.items()
    }
    for name, body in sorted(texts.items(), key=lambda one: len(one[1])):
        code = None
        try:
            await bodies.read(body)
        except ApiError as error:
            code = error.code
        assert code == (None if DENSE[name][1] else ErrorCode.INVALID_VALUE), name
        (process,) = processes()
        assert peak_bytes(process.pid) < 2**29 + 32 * len(body), name
