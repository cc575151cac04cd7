"""The bytes of a message: a table of nodes, their scalars, and the tensors as one safetensors file.

Every number in it is validated here before any object is built from it. Numbers of node kinds are part of the
format (``docs/wire-format.md``): append new kinds and never renumber.

Each byte of a tensor is copied only once on either side; safetensors' own functions copy two or three times.
A reader copies each tensor, so that a small one does not keep the whole message alive; one of at least half
of the data shares writable, aligned memory instead.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
import zstandard

from nnsight_engine.core.tensors import flat_bytes
from nnsight_engine.serialization.limits import DecodeError, EncodeError, MessageLimits


class NodeKind(enum.IntEnum):
    NONE = 0
    TRUE = 1
    FALSE = 2
    ELLIPSIS = 3
    NOT_IMPLEMENTED = 4
    INT = 5
    BIG_INT = 6
    FLOAT = 7
    COMPLEX = 8
    STR = 9
    ODD_STR = 10
    BYTES = 11
    BYTEARRAY = 12
    LIST = 13
    TUPLE = 14
    DICT = 15
    SET = 16
    FROZENSET = 17
    SLICE = 18
    RANGE = 19
    ENUM_MEMBER = 20
    DTYPE = 21
    DEVICE = 22
    SIZE = 23
    TENSOR = 24
    ARRAY = 25
    SCALAR = 26
    NAME = 27
    MODULE = 28
    NEW = 29
    CALL = 30
    REFERENCE = 31
    CELL = 32
    NAMESPACE = 33
    FUNCTION = 34
    CLASS = 35
    METHOD = 36
    MEMBER = 37
    SENT_MODULE = 38
    BLOCK = 39


PAYLOADS: dict[NodeKind, type] = {
    NodeKind.INT: int,
    NodeKind.BIG_INT: bytes,
    NodeKind.FLOAT: float,
    NodeKind.STR: str,
    NodeKind.ODD_STR: bytes,
    NodeKind.BYTES: bytes,
    NodeKind.BYTEARRAY: bytes,
    NodeKind.DTYPE: str,
    NodeKind.DEVICE: str,
    NodeKind.NAME: str,
    NodeKind.MODULE: str,
}
"""The type of the scalar that a node of this kind carries; other kinds carry none."""


_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 16
"""In bytes, as memory allocators align; also the size of torch's largest number type."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of safetensors' own readers."""
_NAMES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
SENT_DTYPES: Final = frozenset(_NAMES)
"""Dtypes that every safetensors reader supports; tensors of other dtypes are sent as raw bytes."""
_BY_NAME: Final = {name: dtype for dtype, name in _NAMES.items()}


class _SegmentHeader(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_HEADER: Final = msgspec.json.Decoder(dict[str, _SegmentHeader])


def write_segments(tensors: Mapping[str, torch.Tensor], start: int = 0) -> list[bytes | memoryview]:
    """Return pieces that share the tensors' memory; ``start`` bytes come before them, for alignment."""
    if not tensors:
        return []
    header, pieces, offset = {}, list[bytes | memoryview](), 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = _SegmentHeader(_NAMES[tensor.dtype], list(tensor.shape), (offset, end))
        pieces.append(flat_bytes(tensor).numpy().data)
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-(start + _LENGTH.size + len(text)) % _ALIGNMENT)
    return [_LENGTH.pack(len(text)), text, *pieces]


def read_segments(view: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors; raise a ``DecodeError`` unless they cover the data without gaps or overlaps."""
    if not view:
        return {}
    (length,) = _LENGTH.unpack_from(view) if len(view) >= _LENGTH.size else (len(view),)
    if length > min(_MAX_HEADER_BYTES, len(view) - _LENGTH.size):
        raise DecodeError("the message is broken: the header of its tensors is longer than they are")
    try:
        entries = _HEADER.decode(view[_LENGTH.size : _LENGTH.size + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"the message is broken: its tensors cannot be read ({error})") from error
    data = view[_LENGTH.size + length :]
    offset = 0  # overlapping tensors could take far more memory than was sent
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        start, end = entry.data_offsets
        if start != offset or not start <= end <= len(data):
            raise DecodeError("the message is broken: its tensors are not one after another")
        offset = end
    if offset != len(data):
        raise DecodeError("the message is broken: it has bytes behind its tensors")
    return {name: _tensor(entry, data) for name, entry in entries.items()}


def _tensor(entry: _SegmentHeader, data: memoryview) -> torch.Tensor:
    """Return a segment's tensor, a copy unless it is aligned and at least half of all the data."""
    dtype = _BY_NAME.get(entry.dtype)
    start, end = entry.data_offsets
    if dtype is None or not all(0 <= size < 2**62 for size in entry.shape):
        raise DecodeError(f"the message is broken: a tensor has the type {entry.dtype!r} and {entry.shape}")
    if math.prod(entry.shape) * dtype.itemsize != end - start or start == end:
        raise DecodeError("the message is broken: a tensor has another size than its shape says")
    flat = np.frombuffer(data[start:end], np.uint8)
    if flat.flags.writeable and 2 * flat.nbytes >= len(data) and flat.ctypes.data % _ALIGNMENT == 0:
        return torch.from_numpy(flat).view(dtype).reshape(entry.shape)
    tensor = torch.empty(entry.shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = flat
    return tensor


Piece = bytes | memoryview
"""A part of a message that has not been concatenated yet."""
MAGIC = b"NNSW"
VERSION = 1
_NO_CODEC, _ZSTD = 0, 1
_LEVEL = 1
"""Compression level of zstd. Activations compress poorly, and most networks are faster than the next
level."""
_MAX_WINDOW_BYTES = 128 * 2**20
"""Memory that decompression may use in addition to its output."""
_HEAD = struct.Struct("<4sBBBBIIIIIIQQ")
"""Magic, version, flags, codec, minor version of the sender's Python; numbers of nodes, root node, edges,
integers, floats and texts; bytes of texts and of tensors."""
PYTHON_MINOR = sys.version_info.minor
"""Minor version of this process's Python 3."""
_INTS, _FLOATS = (NodeKind.INT,), (NodeKind.FLOAT,)
_TEXTS = tuple(kind for kind in PAYLOADS if kind not in {NodeKind.INT, NodeKind.FLOAT})
_GROUPS = (_INTS, _FLOATS, _TEXTS)
_GROUP_OF = np.array(
    [
        next((number for number, group in enumerate(_GROUPS) if kind in group), len(_GROUPS))
        for kind in NodeKind
    ]
)
"""For each kind, the index of its scalar group; kinds without a scalar have an index past the last group."""


@dataclasses.dataclass(slots=True)
class NodeTable:
    """The nodes of one message.

    Attributes:
        payloads: For each node its scalar, of the type given by ``PAYLOADS``; None for kinds without one.
        tensors: Contiguous tensors in host memory, by the name that nodes use for them.
        python: Minor version of the sender's Python 3; 0 if unknown.
    """

    kinds: list[int]
    children: Sequence[Sequence[int]]
    payloads: list[Any]
    tensors: dict[str, torch.Tensor]
    root: int = 0
    python: int = PYTHON_MINOR


def pack(table: NodeTable, limits: MessageLimits, *, compress: bool = False) -> list[Piece]:
    """Return pieces that share the tensors' memory; raise an ``EncodeError`` over the uncompressed limits."""
    parts: list[Piece] = [bytes(table.kinds)]
    arities = np.fromiter(map(len, table.children), "<u4", len(table.children))
    edges = np.fromiter(
        (child for children in table.children for child in children), "<u4", int(arities.sum())
    )
    parts += [arities.tobytes(), edges.tobytes()]
    ints = np.array(_payloads(table, _INTS), "<i8")
    floats = np.array(_payloads(table, _FLOATS), "<f8")
    texts = [text.encode() if isinstance(text, str) else text for text in _payloads(table, _TEXTS)]
    if max(map(len, texts), default=0) > limits.max_text_bytes:
        raise EncodeError(f"a string has more than the {limits.max_text_bytes:,} bytes that one may have")
    lengths = np.fromiter(map(len, texts), "<u4", len(texts))
    parts += [ints.tobytes(), floats.tobytes(), lengths.tobytes(), *texts]
    tensors = write_segments(table.tensors, _HEAD.size + sum(map(len, parts)))
    counts = (len(edges), len(ints), len(floats), len(texts), sum(map(len, texts)), sum(map(len, tensors)))
    parts += tensors
    codec = _ZSTD if compress else _NO_CODEC
    head = _HEAD.pack(MAGIC, VERSION, 0, codec, table.python, len(table.kinds), table.root, *counts)
    num_bytes = sum(map(len, parts)) + len(head)
    if num_bytes > limits.max_bytes:
        raise EncodeError(
            f"the message would have {num_bytes:,} bytes and may have {limits.max_bytes:,}; send less at once"
        )
    if compress:
        return [head, zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(parts))]
    return [head, *parts]


def _payloads(table: NodeTable, kinds: tuple[NodeKind, ...]) -> list[Any]:
    return [payload for kind, payload in zip(table.kinds, table.payloads, strict=True) if kind in kinds]


class _Cursor:
    """Reads consecutive parts of a message; their total size was checked against its length beforehand."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view = view
        self.at = at

    def array(self, dtype: str, count: int) -> np.ndarray[Any, Any]:
        values = np.frombuffer(self.view, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def bytes(self, count: int) -> bytes:
        self.at += count
        return bytes(self.view[self.at - count : self.at])


def unpack(data: bytes | bytearray | memoryview, limits: MessageLimits) -> NodeTable:
    """Return the table; raise a ``DecodeError`` if the bytes are malformed or exceed the limits."""
    view = memoryview(data).cast("B")
    if len(view) > limits.max_bytes:
        raise DecodeError(f"the message has {len(view):,} bytes and may have {limits.max_bytes:,}")
    head, view = _opened(view, limits)
    python, num_nodes, root, num_edges, *num_scalars, num_text_bytes, _ = head
    cursor = _Cursor(view, 0)
    kinds = cursor.array("u1", num_nodes)
    arities = cursor.array("<u4", num_nodes).astype(np.int64)
    edges = cursor.array("<u4", num_edges)
    if int(arities.sum()) != num_edges or (num_edges and int(edges.max()) >= num_nodes):
        raise DecodeError("the message is broken: its nodes refer to nodes that are not there")
    if int(kinds.max()) >= len(NodeKind):
        raise DecodeError("the message holds a kind of node that this version does not know")
    payloads = _read_payloads(cursor, kinds, num_scalars, num_text_bytes, limits)
    ends = np.cumsum(arities).tolist()
    flat = edges.tolist()
    return NodeTable(
        kinds=kinds.tolist(),
        children=[flat[end - size : end] for end, size in zip(ends, arities.tolist(), strict=True)],
        payloads=payloads,
        tensors=read_segments(view[cursor.at :]),
        root=root,
        python=python,
    )


def _opened(view: memoryview, limits: MessageLimits) -> tuple[tuple[int, ...], memoryview]:
    """Return the head's numbers from Python's version on, and the decompressed body of the stated size.

    A node has a byte for its kind and four for its number of children; an edge and a text's length have four.
    """
    if len(view) < _HEAD.size or bytes(view[:4]) != MAGIC:
        raise DecodeError(f"these {len(view):,} bytes are no message: one begins with {MAGIC!r}")
    _, version, flags, codec, python, *counts = _HEAD.unpack_from(view)
    if version != VERSION:
        older = "the sender" if version < VERSION else "this side"
        raise DecodeError(
            f"the message has version {version} of the format and this side reads version {VERSION}: {older} "
            "is older; upgrade its nnsight-engine"
        )
    if flags or codec not in {_NO_CODEC, _ZSTD}:
        raise DecodeError(
            f"the message asks for flags {flags:#x} and codec {codec}, which this version lacks"
        )
    if codec == _ZSTD and not limits.compressed:
        raise DecodeError("the message is compressed, which was not requested")
    num_nodes, root, num_edges, num_ints, num_floats, num_texts, num_text_bytes, num_tensor_bytes = counts
    num_bytes = 5 * num_nodes + 4 * num_edges + 8 * (num_ints + num_floats) + 4 * num_texts
    num_bytes += num_text_bytes + num_tensor_bytes
    body = view[_HEAD.size :]
    if codec == _ZSTD:
        if num_bytes > limits.max_bytes:
            raise DecodeError(f"the message unpacks to {num_bytes:,} bytes and may to {limits.max_bytes:,}")
        body = memoryview(_decompressed(body, num_bytes))
    if num_bytes != len(body):
        raise DecodeError("the message is broken: its parts have other sizes than it says")
    if not root < num_nodes <= limits.max_nodes:
        raise DecodeError(f"the message has {num_nodes:,} objects and may have 1 to {limits.max_nodes:,}")
    return (python, *counts), body


def _decompressed(body: memoryview, num_bytes: int) -> bytes:
    """Decompress the body into at most the ``num_bytes`` that the head declares."""
    try:
        size = zstandard.frame_content_size(body)
        if size not in {num_bytes, -1}:
            raise DecodeError("the message is broken: it unpacks to another size than it says")
        opener = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        return opener.decompress(body, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(f"the message is broken: it cannot be unpacked ({error})") from error


def _read_payloads(
    cursor: _Cursor,
    kinds: np.ndarray[Any, Any],
    counts: list[int],
    num_text_bytes: int,
    limits: MessageLimits,
) -> list[Any]:
    """Return each node's scalar, None without one: the body has all integers, then floats, then texts."""
    payloads: list[Any] = [None] * len(kinds)
    groups = _GROUP_OF[kinds]
    nodes_by_group = [np.flatnonzero(groups == group).tolist() for group in range(len(_GROUPS))]
    if [len(group) for group in nodes_by_group] != counts:
        raise DecodeError(
            "the message is broken: it has another number of scalars than of nodes that want one"
        )
    *number_groups, text_nodes = nodes_by_group
    for group, dtype in zip(number_groups, ("<i8", "<f8"), strict=True):
        for node, value in zip(group, cursor.array(dtype, len(group)).tolist(), strict=True):
            payloads[node] = value
    lengths = cursor.array("<u4", len(text_nodes))
    if int(lengths.astype(np.int64).sum()) != num_text_bytes:
        raise DecodeError("the message is broken: its texts have other sizes than it says")
    if len(lengths) and int(lengths.max()) > limits.max_text_bytes:
        raise DecodeError(f"a string has more than {limits.max_text_bytes:,} bytes")
    for node, length in zip(text_nodes, lengths.tolist(), strict=True):
        text = cursor.bytes(length)
        try:
            payloads[node] = text.decode() if PAYLOADS[NodeKind(int(kinds[node]))] is str else text
        except UnicodeDecodeError as error:
            raise DecodeError(f"the message is broken: a text is not UTF-8 ({error})") from error
    return payloads
