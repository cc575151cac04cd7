"""Encodings of blocks: the wire format, or pickle for trusted senders (``app.auth.principal``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from nnsight_engine.serialization import (
    TRUSTED,
    DecodeError,
    MessageLimits,
    Policy,
    ReceivedTrace,
    SentBlock,
    decode_trace,
    decode_trace_pickled,
    encode_trace,
    encode_trace_pickled,
)
from nnsight_engine.serialization.graph import Reference, Resolve
from nnsight_engine.serialization.wire import DEFAULT_LIMITS

Codec = Literal["wire", "cloudpickle"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)


def encode_blocks(
    codec: Codec,
    blocks: Sequence[SentBlock],
    shared: Mapping[str, Any] | None = None,
    *,
    reference: Reference | None = None,
    saved: Collection[int] = (),
    limits: MessageLimits = DEFAULT_LIMITS,
) -> bytes:
    """Return blocks in a codec's form; the arguments are those of ``encode_trace``."""
    encode = encode_trace_pickled if codec == "cloudpickle" else encode_trace
    return encode(blocks, shared, reference=reference, saved=saved, limits=limits)


def decode_blocks(
    codec: str,
    data: bytes | bytearray | memoryview,
    *,
    resolve: Resolve | None = None,
    limits: MessageLimits = DEFAULT_LIMITS,
    trusted: bool = False,
    policy: Policy = TRUSTED,
) -> ReceivedTrace:
    """Return the compiled blocks of a message; runs the sender's code, arbitrary code for cloudpickle.

    Raises:
        DecodeError: The message is malformed, or only trusted senders may send it.
        SandboxError: It holds code that the policy refuses.
    """
    if codec == "wire":
        return decode_trace(data, resolve=resolve, policy=policy, limits=limits)
    if codec != "cloudpickle":
        raise DecodeError(f"blocks are written in one of {', '.join(CODECS)}, not in {codec!r}")
    if not trusted:
        raise DecodeError("blocks written in 'cloudpickle' are read from trusted senders only: use 'wire'")
    return decode_trace_pickled(data, resolve=resolve, limits=limits)
