"""Serialization between processes that do not trust each other's bytes; see ``docs/wire-format.md``.

No format here runs code from its input without the reader's consent, except ``trusted``, which uses pickle.
"""

from nnsight_engine.serialization.blocks import SentBlock
from nnsight_engine.serialization.failures import encode_error, restore_error
from nnsight_engine.serialization.graph import Reference, Resolve
from nnsight_engine.serialization.limits import (
    DATA_ONLY,
    TRUSTED,
    DecodeError,
    EncodeError,
    MessageLimits,
    Policy,
    SandboxError,
)
from nnsight_engine.serialization.source.import_resolution import register_by_value, unregister_by_value
from nnsight_engine.serialization.trusted import decode_trace_pickled, encode_trace_pickled
from nnsight_engine.serialization.wire import (
    ReceivedTrace,
    decode,
    decode_trace,
    encode,
    encode_trace,
)

__all__ = [
    "DATA_ONLY",
    "TRUSTED",
    "DecodeError",
    "EncodeError",
    "MessageLimits",
    "Policy",
    "ReceivedTrace",
    "Reference",
    "Resolve",
    "SandboxError",
    "SentBlock",
    "decode",
    "decode_trace",
    "decode_trace_pickled",
    "encode",
    "encode_error",
    "encode_trace",
    "encode_trace_pickled",
    "register_by_value",
    "restore_error",
    "unregister_by_value",
]
