"""``encode`` and ``decode``: values to bytes and back, without pickle, marshal or similar formats."""

from __future__ import annotations

from typing import Any

import torch

from nnsight_engine.serialization.decoding.blocks import BLOCK_MAKERS
from nnsight_engine.serialization.decoding.data import DATA_MAKERS
from nnsight_engine.serialization.decoding.decoder import Decoder, Resolve
from nnsight_engine.serialization.decoding.definitions import CODE_MAKERS
from nnsight_engine.serialization.encoding.encoder import Encoder, Reference
from nnsight_engine.serialization.encoding.objects import write
from nnsight_engine.serialization.errors import EncodeError
from nnsight_engine.serialization.limits import DATA_ONLY, MessageLimits, Policy
from nnsight_engine.serialization.message.table import Piece, pack, unpack

DEFAULT_LIMITS = MessageLimits()
_MAKERS = {**DATA_MAKERS, **CODE_MAKERS, **BLOCK_MAKERS}
_HOST = torch.device("cpu")


def encode(
    value: Any,
    *,
    reference: Reference | None = None,
    limits: MessageLimits = DEFAULT_LIMITS,
    compress: bool = False,
) -> bytes:
    """Return the value as a message; cycles are supported, and no code of the reading side runs.

    Args:
        reference: Called for every object except numbers and strings; returns a name for objects that the
            other side already has, None for the rest.
        limits: Limits of the uncompressed message.
        compress: Compress with zstd; only for a receiver that has announced support.

    Raises:
        EncodeError: A part cannot be serialized; the message gives its path and the reason.
    """
    return b"".join(encode_pieces(value, reference=reference, limits=limits, compress=compress))


def encode_pieces(
    value: Any,
    *,
    reference: Reference | None = None,
    limits: MessageLimits = DEFAULT_LIMITS,
    compress: bool = False,
) -> list[Piece]:
    """Return the message of ``encode`` as pieces; tensor pieces share the tensors' memory without a copy."""
    encoder = new_encoder(reference, limits)
    root = encoder.node(value, -1, "")
    return finished(encoder, root, compress=compress)


def decode(
    data: bytes | bytearray | memoryview,
    *,
    resolve: Resolve | None = None,
    policy: Policy = DATA_ONLY,
    limits: MessageLimits = DEFAULT_LIMITS,
    device: torch.device | str = _HOST,
) -> Any:
    """Return the value from a message that ``encode`` wrote; it may come from an untrusted sender.

    Args:
        resolve: Returns the object for a name that ``reference`` gave.
        policy: What the message may import and run; by default it may hold data only.
        device: Target device of tensors; tensors on the meta device stay there.

    Raises:
        DecodeError: It is no message, exceeds a limit, or needs something that the policy refuses.
    """
    table = unpack(data, limits)
    decoder = Decoder(
        table, _MAKERS, resolve=resolve, policy=policy, limits=limits, device=torch.device(device)
    )
    return decoder.value(table.root)


def new_encoder(reference: Reference | None, limits: MessageLimits) -> Encoder:
    return Encoder(write, reference, limits)


def finished(encoder: Encoder, root: int, *, compress: bool = False) -> list[Piece]:
    try:
        encoder.run()
    except EncodeError:
        raise
    except (Exception, RecursionError) as error:
        raise EncodeError(f"the value cannot be sent: {type(error).__name__}: {error}") from error
    return pack(encoder.table(root), encoder.limits, compress=compress)
