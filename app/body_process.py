"""Large bodies read in a process of its own: ``python -m`` this one, by ``large_bodies``.

Parsing JSON holds the interpreter's lock from the first byte to the last, so in a thread it holds up the
event loop all the same. This process reads a body, checks it, and answers with JSON that is quick to parse:
what would be many values is a string, or was refused. It takes one at a time, and ends when the server does.
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
from app.body import check_depth, parse_object
from app.body_fields import FieldLimits, checked
from app.large_bodies import ANSWERED, ASKED
from nnsight_engine.core.process_memory import address_space_bytes, end_before_server

_NICENESS: Final = 5
_BYTES_PER_BYTE: Final = 32
"""Memory for each byte of a body. A list of numbers that becomes a tensor needs about 24, with all that is
made of it, and nothing that a request may hold needs more; empty lists in lists take up to 48: refused."""
_SPARE_BYTES: Final = 64 * 2**20
"""For the interpreter, whatever the body."""


def _answer(limits: FieldLimits, body: bytes) -> tuple[bool, bytes]:
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
    # In ASCII, so that lone surrogates, which JSON allows, stay what they are.
    return True, json.dumps(value, separators=(",", ":")).encode()


def serve(asked: BinaryIO, answered: BinaryIO) -> None:
    """Answer until nobody asks any more."""
    gc.disable()  # JSON has no circles, and looking for some takes longer than parsing
    os.nice(_NICENESS)
    end_before_server()
    own_bytes = address_space_bytes() + _SPARE_BYTES
    while head := asked.read(ASKED.size):
        num_limits, num_bytes = ASKED.unpack(head)
        most = own_bytes + _BYTES_PER_BYTE * num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        limits = msgspec.json.decode(asked.read(num_limits), type=FieldLimits)
        is_body, data = _answer(limits, asked.read(num_bytes))
        answered.write(ANSWERED.pack(is_body, len(data)))
        answered.write(data)
        answered.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
