"""Values to bytes and back: the two functions that most callers need.

``encode`` never runs code of the reading side, and ``decode`` runs what its policy allows and nothing else;
by default it reads data alone. Neither uses pickle, marshal or anything like them.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_engine.serialization.block_decoding import BLOCK_MAKERS
from nnsight_engine.serialization.code_decoding import CODE_MAKERS
from nnsight_engine.serialization.data_decoding import DATA_MAKERS
from nnsight_engine.serialization.decoder import Decoder, Resolve
from nnsight_engine.serialization.encoder import Encoder, Reference
from nnsight_engine.serialization.errors import EncodeError
from nnsight_engine.serialization.limits import DATA_ONLY, MessageLimits, Policy
from nnsight_engine.serialization.message import Piece, pack, unpack
from nnsight_engine.serialization.object_encoding import write

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
    """Return the value as a message.

    Args:
        value: Data, tensors, modules, functions, objects of one's own classes, cycles included.
        reference: Asked for every object but numbers and strings; names those that the other side has.
        limits: What the message may cost, uncompressed.
        compress: Compress it, with zstd, if the other side has said that it takes that.

    Raises:
        EncodeError: Something in it cannot travel; says where it is and why.
    """
    return b"".join(encode_pieces(value, reference=reference, limits=limits, compress=compress))


def encode_pieces(
    value: Any,
    *,
    reference: Reference | None = None,
    limits: MessageLimits = DEFAULT_LIMITS,
    compress: bool = False,
) -> list[Piece]:
    """Return what ``encode`` does in pieces, those of tensors being their own memory, not copied yet."""
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
    """Return the value that ``encode`` made a message of.

    Args:
        data: The message, from anyone.
        resolve: Gives the object that ``reference`` named.
        policy: What the message may import and run.
        limits: What it may cost.
        device: Where tensors go; those on the meta device stay there.

    Raises:
        DecodeError: It is no message, costs too much, or asks for what the policy refuses.
    """
    table = unpack(data, limits)
    decoder = Decoder(
        table, _MAKERS, resolve=resolve, policy=policy, limits=limits, device=torch.device(device)
    )
    return decoder.value(table.root)


def new_encoder(reference: Reference | None, limits: MessageLimits) -> Encoder:
    """Return what writes one message."""
    return Encoder(write, reference, limits)


def finished(encoder: Encoder, root: int, *, compress: bool = False) -> list[Piece]:
    """Write all that was met, and return the message in pieces.

    Raises:
        EncodeError: Something in it cannot travel.
    """
    try:
        encoder.run()
    except EncodeError:
        raise
    except (Exception, RecursionError) as error:
        raise EncodeError(f"the value cannot be sent: {type(error).__name__}: {error}") from error
    return pack(encoder.table(root), encoder.limits, compress=compress)
