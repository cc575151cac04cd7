"""``encode`` and ``decode``: values and traces to bytes and back, without pickle, marshal or similar formats.

A trace is blocks with the variables and globals that they use. Variables are read from the cells given with
each block, because a block's own cells may have been copied or may not be filled yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import CellType
from typing import Any

import torch

from nnsight_engine.serialization.decoding.data import DATA_MAKERS
from nnsight_engine.serialization.decoding.decoder import Decoder, Resolve
from nnsight_engine.serialization.decoding.definitions import BLOCK_MAKERS, CODE_MAKERS
from nnsight_engine.serialization.encoding.definitions import write_sent_block
from nnsight_engine.serialization.encoding.encoder import Encoder, Reference
from nnsight_engine.serialization.encoding.objects import write
from nnsight_engine.serialization.limits import (
    DATA_ONLY,
    TRUSTED,
    DecodeError,
    EncodeError,
    MessageLimits,
    Policy,
)
from nnsight_engine.serialization.message import NodeKind, Piece, pack, unpack
from nnsight_engine.tracing.tracer import Info

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


@dataclasses.dataclass(frozen=True, slots=True)
class SentBlock:
    """A block to send; a variable that ``cells`` lacks starts unbound, globals ``left_out`` are not sent."""

    info: Info
    cells: Mapping[str, CellType]
    left_out: frozenset[str] = frozenset()


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
    encoder = new_encoder(reference, limits)
    parts: list[Any] = [list(blocks), dict(shared or {}), list[Any]()]
    root = encoder.node(parts, -1, "", writer=_write_trace)
    marks = encoder.node(parts[2], root, "", writer=_write_marks)

    def finish() -> bool:
        encoder.emit(marks, NodeKind.LIST, sorted(set(encoder.numbers_of(saved)) - {marks}))
        return False

    encoder.finishers.append(finish)
    return b"".join(finished(encoder, root, compress=compress))


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
    if not isinstance(parts, list) or len(parts) != 3:
        raise DecodeError("the message holds a value, not a trace")
    blocks, shared, saved = parts
    if not (isinstance(blocks, list) and isinstance(shared, dict) and isinstance(saved, list)):
        raise DecodeError("the message holds a value, not a trace")
    if not all(isinstance(block, Info) for block in blocks):
        raise DecodeError("the message holds a block that is none")
    return ReceivedTrace(blocks, shared, saved)


def _write_trace(encoder: Encoder, index: int, value: list[Any]) -> None:
    blocks, shared, saved = value
    encoder.emit(
        index,
        NodeKind.LIST,
        [
            encoder.node(blocks, index, "", writer=_write_blocks),
            encoder.node(shared, index, "", writer=_write_shared),
            encoder.node(saved, index, "", writer=_write_marks),
        ],
    )


def _write_blocks(encoder: Encoder, index: int, value: list[SentBlock]) -> None:
    encoder.emit(
        index,
        NodeKind.LIST,
        [
            encoder.node(block, index, "block {}", at, writer=write_sent_block)
            for at, block in enumerate(value)
        ],
    )


def _write_shared(encoder: Encoder, index: int, value: dict[str, Any]) -> None:
    children = [
        node
        for name, item in value.items()
        for node in (encoder.node(name, index, ""), encoder.node(item, index, "shared value `{}`", name))
    ]
    encoder.emit(index, NodeKind.DICT, children)


def _write_marks(_encoder: Encoder, _index: int, _value: list[Any]) -> None:
    """Write nothing: the marks are written by the finisher, when every object is known."""
