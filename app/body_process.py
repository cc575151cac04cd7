"""Large bodies read in a process of its own: ``python -m`` this one, by ``bodies``.

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
from app.bodies import ANSWERED, ASKED
from app.body import check_depth, parse_object
from app.body_fields import FieldLimits, checked

_NICENESS: Final = 5
_MAX_BYTES: Final = 8 * 2**30
"""Of address space: what the values of the largest body take, and no more than that."""


def _answer(limits: FieldLimits, body: bytes) -> tuple[bool, bytes]:
    try:
        check_depth(body, limits.max_depth)
        value = checked(parse_object(body), limits)
    except ApiError as error:
        return False, json.dumps([error.code, error.message, error.param]).encode()
    except MemoryError:
        refusal = [ErrorCode.INVALID_VALUE, "The body holds more values than can be looked at.", None]
        return False, json.dumps(refusal).encode()
    # In ASCII, so that lone surrogates, which JSON allows, stay what they are.
    return True, json.dumps(value, separators=(",", ":")).encode()


def serve(asked: BinaryIO, answered: BinaryIO) -> None:
    """Answer until nobody asks any more."""
    gc.disable()  # JSON has no circles, and looking for some takes longer than parsing
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    while head := asked.read(ASKED.size):
        num_limits, num_bytes = ASKED.unpack(head)
        limits = msgspec.json.decode(asked.read(num_limits), type=FieldLimits)
        is_body, data = _answer(limits, asked.read(num_bytes))
        answered.write(ANSWERED.pack(is_body, len(data)))
        answered.write(data)
        answered.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
