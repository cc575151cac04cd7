"""Processes that read large bodies: shares of tenants, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from api_schemas.errors import ApiError, ErrorCode
from app import body_process
from app.allowance import Allowance
from app.body_fields import FieldLimits
from app.large_bodies import LargeBodyReader
from app.process_environment import environment_for_traces
from tests.child_processes import children_running
from tests.waiting import wait_for_async

LIMITS = FieldLimits(max_depth=16, max_objects=1000, max_values=1000, max_prompt_ids=1000)


class Slow(LargeBodyReader):
    """Reads nothing before it may.

    Attributes:
        reading: How many bodies of each first byte are being read.
    """

    def __init__(self) -> None:
        super().__init__(LIMITS, {}, Allowance.of("bodies", 2, 0.5))
        self.reading: Counter[bytes] = Counter()
        self.may_end = asyncio.Event()

    async def _response(self, body: bytes | bytearray) -> tuple[bool, bytes]:
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


def score_of(pid: int | None) -> int:
    """Return how early the kernel ends a process where memory runs out."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def peak_bytes(pid: int | None) -> int:
    """Return the most address space that a process has had."""
    found = re.search(r"VmPeak:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
async def bodies() -> AsyncIterator[LargeBodyReader]:
    made = LargeBodyReader(LIMITS, environment_for_traces(), Allowance.of("bodies", 2))
    yield made
    await made.close()


async def test_an_idle_process_that_has_died_costs_the_next_body_nothing(bodies: LargeBodyReader):
    assert await bodies.read(b'{"a": 1}') == {"a": 1}
    (process,) = processes()
    os.kill(process.pid, signal.SIGKILL)
    assert await bodies.read(b'{"a": 2}') == {"a": 2}
    (other,) = processes()
    assert other.pid != process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's choice is Linux's")
async def test_the_kernel_ends_it_before_the_server(bodies: LargeBodyReader):
    await bodies.read(b"{}")
    (process,) = processes()
    assert score_of(process.pid) > score_of(os.getpid())


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
