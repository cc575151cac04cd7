"""Parses large bodies in child processes, because parsing JSON in a thread holds the GIL.

A process that takes too long, or whose client has disconnected, is killed. Tenants take turns, and each has a
share of the processes. Waiting bodies are bounded by their bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from api_schemas.errors import ApiError, ErrorCode
from app.formats.json_bodies import FieldLimits
from app.limits.limit import Limit
from app.limits.slots import Slots

REQUEST_HEADER: Final = struct.Struct("<QQ")
"""The request header: sizes in bytes of the limits and of the body, which follow."""
RESPONSE_HEADER: Final = struct.Struct("<?Q")
"""The response header: whether a body follows (else an error's code, message and field), and its size in
bytes.
"""

_MODULE: Final = "app.http.body_process"
_CHUNK_BYTES: Final = 2**20
_LIMIT_S: Final = 60.0
_MAX_REUSE_BYTES: Final = 16 * 2**20
"""A process that has parsed a body of at least this size is ended, since it may retain the memory."""


class LargeBodyReader:
    """Reads bodies in processes, which run with ``environment``; ``processes`` limits how many at once."""

    def __init__(self, limits: FieldLimits, environment: Mapping[str, str], processes: Limit) -> None:
        self.limits = limits
        self._environment = environment
        self._slots = Slots(processes)  # the limit of received bytes bounds those that wait
        self._idle: list[asyncio.subprocess.Process] = []

    async def read(self, body: bytes | bytearray, tenant: str = "") -> dict[str, Any]:
        """Return a body's JSON object; raises as ``read_object`` does, or ``rate_limit_exceeded``."""
        async with self._slots.request(tenant):
            try:
                async with asyncio.timeout(_LIMIT_S):
                    is_body, data = await self._parse_in_process(body)
            except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
                raise ApiError(
                    ErrorCode.RATE_LIMITED,
                    "The server could not read so large a body in time; send it again later.",
                ) from error
        if is_body:
            value: dict[str, Any] = await asyncio.to_thread(json.loads, data)
            return value
        code, message, param = json.loads(data)
        raise ApiError(ErrorCode(code), message, param)

    async def close(self) -> None:
        while self._idle:
            await _end_process(self._idle.pop())

    async def _parse_in_process(self, body: bytes | bytearray) -> tuple[bool, bytes]:
        """Return what ``_exchange`` does, from an idle process, or from a new one if that has ended."""
        if self._idle:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                return await self._parse_in(self._idle.pop(), body)
        return await self._parse_in(await self._start_process(), body)

    async def _parse_in(
        self, process: asyncio.subprocess.Process, body: bytes | bytearray
    ) -> tuple[bool, bytes]:
        """Parse a body in a process, which is kept for others unless it failed or the body was very large."""
        is_done = False
        try:
            answer = await self._exchange(process, body)
            is_done = True
        finally:
            if is_done and len(body) < _MAX_REUSE_BYTES:
                self._idle.append(process)
            else:
                await _end_process(process)
        return answer

    async def _start_process(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", _MODULE,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=self._environment, start_new_session=True,
        )  # fmt: skip

    async def _exchange(
        self, process: asyncio.subprocess.Process, body: bytes | bytearray
    ) -> tuple[bool, bytes]:
        """Send a body; return whether it is accepted, and its JSON, or the error's as JSON."""
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        limits = msgspec.json.encode(self.limits)
        process.stdin.write(REQUEST_HEADER.pack(len(limits), len(body)) + limits)
        with memoryview(body) as view:
            for start in range(0, len(body), _CHUNK_BYTES):
                process.stdin.write(bytes(view[start : start + _CHUNK_BYTES]))
                await process.stdin.drain()
        is_body, num_bytes = RESPONSE_HEADER.unpack(await process.stdout.readexactly(RESPONSE_HEADER.size))
        return is_body, await process.stdout.readexactly(num_bytes)


async def _end_process(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
