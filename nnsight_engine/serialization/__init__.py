"""Serialization between processes that do not trust each other's bytes; see ``docs/wire-format.md``.

No format here runs code from its input without the reader's consent, except ``trusted``, which uses pickle.
"""

from nnsight_engine.serialization.errors import DecodeError, EncodeError, SandboxError
from nnsight_engine.serialization.failures import encode_error, restore_error
from nnsight_engine.serialization.limits import DATA_ONLY, TRUSTED, MessageLimits, Policy
from nnsight_engine.serialization.source.import_resolution import register_by_value, unregister_by_value
from nnsight_engine.serialization.traces import ReceivedTrace, SentBlock, decode_trace, encode_trace
from nnsight_engine.serialization.trusted import decode_trace_pickled, encode_trace_pickled
from nnsight_engine.serialization.values import decode, encode

__all__ = [
    "DATA_ONLY",
    "TRUSTED",
    "DecodeError",
    "EncodeError",
    "MessageLimits",
    "Policy",
    "ReceivedTrace",
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
