"""What blocks are written in: the wire format, or a pickle for readers that trust the sender.

A request's head names the codec. Clients call ``encode_blocks``; engines call ``decode_blocks`` where the
blocks run, with ``trusted`` only if the server has checked whose they are (``app.auth.codecs``).
"""

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
from nnsight_engine.serialization.decoder import Resolve
from nnsight_engine.serialization.encoder import Reference
from nnsight_engine.serialization.values import DEFAULT_LIMITS

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
    """Return blocks as a message, see ``wire.encode_trace``.

    Raises:
        EncodeError: Something in it cannot travel.
    """
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
    """Return the blocks of a message, compiled. Runs code of its sender's, and if trusted any.

    Args:
        codec: What the message is written in.
        data: The message.
        resolve: Gives the object that ``reference`` named.
        limits: What it may cost.
        trusted: Whether the sender is one whose pickles are read.
        policy: What code in the wire format may do, ``restricted_policy(budget)`` for one.

    Raises:
        DecodeError: It is no such message, or one that only trusted senders may send.
        SandboxError: It holds code that the policy refuses.
    """
    if codec == "wire":
        return decode_trace(data, resolve=resolve, policy=policy, limits=limits)
    if codec != "cloudpickle":
        raise DecodeError(f"blocks are written in one of {', '.join(CODECS)}, not in {codec!r}")
    if not trusted:
        raise DecodeError("blocks written in 'cloudpickle' are read from trusted senders only: use 'wire'")
    return decode_trace_pickled(data, resolve=resolve, limits=limits)


__all__ = ["CODECS", "Codec", "decode_blocks", "encode_blocks"]
