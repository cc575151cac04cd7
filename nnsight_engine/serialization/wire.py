"""``encode`` and ``decode``: values and traces to bytes and back, without pickle, marshal or similar formats.

A trace is blocks with the variables and globals that they use. Variables are read from the cells given with
each block, because a block's own cells may have been copied or may not be filled yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from nnsight_engine.serialization.blocks import BLOCK_KINDS, SentBlock
from nnsight_engine.serialization.data import DATA_KINDS, write_items, write_pairs
from nnsight_engine.serialization.definitions import DEFINITION_KINDS
from nnsight_engine.serialization.graph import Decoder, Encoder, Kind, Reference, Resolve, Writer, Written
from nnsight_engine.serialization.limits import (
    DATA_ONLY,
    TRUSTED,
    DecodeError,
    EncodeError,
    MessageLimits,
    Policy,
)
from nnsight_engine.serialization.message import NodeKind, Piece, pack, unpack
from nnsight_engine.serialization.objects import OBJECT_KINDS, SPECIAL_WRITERS, write_object
from nnsight_engine.serialization.scopes import SCOPE_KINDS
from nnsight_engine.tracing.tracer import Info

DEFAULT_LIMITS: Final = MessageLimits()
KINDS: Final[tuple[Kind, ...]] = tuple(
    sorted(
        (*DATA_KINDS, *OBJECT_KINDS, *SCOPE_KINDS, *DEFINITION_KINDS, *BLOCK_KINDS),
        key=lambda kind: kind.number,
    )
)
"""Every kind of node, at its number."""
_BY_TYPE: Final[dict[type, Writer]] = {
    **{one: kind.write for kind in KINDS if kind.write is not None for one in kind.types},
    **SPECIAL_WRITERS,
}
_BY_BASE: Final = [(kind.bases, kind.write) for kind in KINDS if kind.write is not None and kind.bases]
_HOST: Final = torch.device("cpu")


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
    encoder = Encoder(_write, reference, limits)
    encoder.node(value)
    return _packed(encoder, compress=compress)


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
    where = torch.device(device)
    return Decoder(table, KINDS, resolve=resolve, policy=policy, limits=limits, device=where).value()


def _write(encoder: Encoder, value: Any) -> Written:
    """Write an object by the writer of its type, or of a base, or by Python's copy protocol."""
    writer = _BY_TYPE.get(type(value))
    if writer is None:
        writer = next((write for bases, write in _BY_BASE if isinstance(value, bases)), write_object)
    return writer(encoder, value)


def _packed(encoder: Encoder, *, compress: bool) -> list[Piece]:
    """Write all objects that were reached, and return the message; any failure is an EncodeError."""
    try:
        table = encoder.table()
    except EncodeError:
        raise
    except (Exception, RecursionError) as error:
        raise EncodeError(f"the value cannot be sent: {type(error).__name__}: {error}") from error
    return pack(table, encoder.limits, compress=compress)


@dataclasses.dataclass(frozen=True, slots=True)
class ReceivedTrace:
    """A decoded trace; the blocks have cells of their own, ``saved`` holds the objects marked as saved."""

    blocks: list[Info]
    shared: dict[str, Any]
    saved: list[Any]


def encode_trace(
    blocks: Sequence[SentBlock],
    shared: Mapping[str, Any] | None = None,
    *,
    reference: Reference | None = None,
    saved: Collection[int] = (),
    limits: MessageLimits = DEFAULT_LIMITS,
    compress: bool = False,
) -> bytes:
    """Return blocks as a message; identity is preserved between ``shared`` and the blocks' variables.

    ``saved`` are the ids of marked objects, such as ``SAVES.marked``. For the rest see ``encode``.
    """
    encoder = Encoder(_write, reference, limits)
    parts = (list(blocks), dict(shared or {}), list[Any]())
    encoder.node(parts, writer=_write_trace)
    marks = encoder.node(parts[2], writer=_write_marks)

    def finish() -> bool:
        """Write which nodes are of saved objects, now that all objects have their numbers."""
        encoder.emit(marks, NodeKind.LIST, sorted(encoder.numbers_of(saved) - {marks}))
        return False

    encoder.at_the_end(finish)
    return b"".join(_packed(encoder, compress=compress))


_write_blocks: Final = write_items(NodeKind.LIST, "block {}")
_write_shared: Final = write_pairs("shared value `{}`", str)


def _write_trace(encoder: Encoder, value: tuple[list[Any], dict[str, Any], list[Any]]) -> Written:
    """Write a trace: its blocks, its shared values, and the list of its saved objects."""
    writers = (_write_blocks, _write_shared, _write_marks)
    return NodeKind.LIST, [
        encoder.node(part, writer=write) for part, write in zip(value, writers, strict=True)
    ]


def _write_marks(_encoder: Encoder, _value: list[Any]) -> Written:
    """Write nothing: the marks are known when every object is."""
    return NodeKind.LIST, ()


def decode_trace(
    data: bytes | bytearray | memoryview,
    *,
    resolve: Resolve | None = None,
    policy: Policy = TRUSTED,
    limits: MessageLimits = DEFAULT_LIMITS,
    device: torch.device | str = "cpu",
) -> ReceivedTrace:
    """Return the compiled blocks; decoding runs code: class bodies and constructors of imported classes."""
    parts = decode(data, resolve=resolve, policy=policy, limits=limits, device=device)
    kinds = (list, dict, list)
    if not (isinstance(parts, list) and len(parts) == len(kinds) and all(map(isinstance, parts, kinds))):
        raise DecodeError("the message holds a value, not a trace")
    blocks, shared, saved = parts
    if not all(isinstance(block, Info) for block in blocks):
        raise DecodeError("the message holds a block that is none")
    return ReceivedTrace(blocks, shared, saved)
