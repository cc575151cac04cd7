"""Parses large bodies in a separate process, started by ``large_bodies`` with ``python -m``.

The answer is JSON that is quick to parse, since the event loop does: tensors are a single string.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from typing import BinaryIO, Final

import msgspec

from api_schemas.errors import ApiError, ErrorCode
from app.formats.json_bodies import FieldLimits, check_depth, checked, parse_object
from app.http.large_bodies import REQUEST_HEADER, RESPONSE_HEADER
from nnsight_engine.core.process import address_space_bytes, end_before_server

_NICENESS: Final = 5
_BYTES_PER_BYTE: Final = 32
"""Memory per byte of a body. A list of numbers that becomes a tensor needs about 24, including all
intermediate values, and nothing that a request may contain needs more. Nested empty lists need up to 48
and are rejected.
"""
_SPARE_BYTES: Final = 64 * 2**20
"""Memory for the interpreter, independent of the body."""


def _parse(limits: FieldLimits, body: bytes) -> tuple[bool, bytes]:
    """Return whether the body is accepted, and its JSON, or the code, message and field of the error."""
    try:
        check_depth(body, limits.max_depth)
        value = checked(parse_object(body), limits)
    except ApiError as error:
        return False, json.dumps([error.code, error.message, error.param]).encode()
    except MemoryError:
        message = (
            f"Reading a body may take {_BYTES_PER_BYTE} times its size in memory, and this one of "
            f"{len(body)} bytes takes more: it has too many objects and lists for its size; send fewer."
        )
        refusal = [ErrorCode.INVALID_VALUE, message, None]
        return False, json.dumps(refusal).encode()
    # ASCII output preserves lone surrogates, which JSON allows.
    return True, json.dumps(value, separators=(",", ":")).encode()


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """Answer the server's requests until it closes the pipe; memory is limited anew for each body."""
    gc.disable()  # parsed JSON has no reference cycles, and collecting takes longer than parsing
    os.nice(_NICENESS)
    end_before_server()
    own_bytes = address_space_bytes() + _SPARE_BYTES
    while head := requests.read(REQUEST_HEADER.size):
        num_limits, num_bytes = REQUEST_HEADER.unpack(head)
        max_bytes = own_bytes + _BYTES_PER_BYTE * num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.RLIM_INFINITY))
        limits = msgspec.json.decode(requests.read(num_limits), type=FieldLimits)
        is_body, data = _parse(limits, requests.read(num_bytes))
        responses.write(RESPONSE_HEADER.pack(is_body, len(data)))
        responses.write(data)
        responses.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
