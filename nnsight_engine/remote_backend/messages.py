"""What a client sends to have blocks run: a head in JSON, then parts of bytes.

``NNSR``, a version byte, three zero bytes, the head's length (4 bytes, little-endian), the head, and the
parts one after another, whose sizes the head says. The first part is the blocks, see ``wire``; a server needs
to read the head alone to know where to send it. ``docs/remote.md`` is the format byte by byte.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from nnsight_engine.serialization import DecodeError

MEDIA_TYPE: Final = "application/vnd.nnsight.trace"
MAGIC: Final = b"NNSR"
VERSION: Final = 1
_START: Final = struct.Struct("<4sBxxxI")
_MAX_HEAD_BYTES: Final = 16 * 2**20
_LARGE_HEAD_BYTES: Final = 256 * 2**10
"""A head of more is read piece by piece: one call of the parser holds the interpreter until it is done."""
_MAX_PIECE_BYTES: Final = 256 * 2**10
"""Of a block's variables, and of a request beside its prompt."""
_MAX_PIECES_BYTES: Final = 4 * 2**20
"""Of all of those."""
_MAX_ITEMS: Final = 4096
"""Blocks, requests, edits and parts of one trace."""
Ask = Callable[[bytes | bytearray | memoryview], Awaitable[bytes | bytearray | memoryview]]
Count = Annotated[int, msgspec.Meta(ge=0)]


class SentEdit(msgspec.Struct, frozen=True, kw_only=True):
    """An edit that runs beside a request's block.

    Attributes:
        name: What messages call it.
        digest: Of its block.
        part: Which of the message's parts it is.
    """

    name: str
    digest: str
    part: Count


class SentInvoke(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace on vLLM.

    Attributes:
        prompt: Text, or token ids.
        sampling: vLLM's sampling parameters, those of the trace included.
        edits: What runs beside its block.
    """

    prompt: str | list[Count]
    sampling: dict[str, Any] = {}
    edits: list[SentEdit] = []


class TraceHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has to know of a trace; unknown fields of newer clients are ignored.

    Attributes:
        model: Whose blocks they are: a repository's name, a folder's, or the name the server gives its model.
        revision: Of the repository, if the client asked for one.
        fingerprint: Of the model's shape, see ``fingerprint_of``; empty where the client knows none.
        dialect: Whose modules the blocks name, vLLM's or those of the transformers library.
        engine: What is to run it; ``auto`` leaves that to the server.
        kind: One trace, or a session of several.
        codec: What the blocks are written in, ``wire`` or, for servers that trust the key, ``cloudpickle``.
        groups: For each block, its variables' names and the numbers of the surrounding variables they are.
        invokes: On vLLM, the requests, one for each block.
        method: On transformers, the method of the module that is traced; empty for a call of the module.
        num_edits: How many of the blocks, the last ones, are edits.
        wanted: Names to send home although nobody saved them: later traces of a session use them.
        streams: Whether outputs are to be told as they come.
        local_parts: Whether the client is there to run parts of its blocks, over its job's WebSocket.
        accepts: Codecs in which the client reads results, ``zstd``.
        python: The client's version of Python, ``3.12.1``.
        client: The client's version of this package.
        parts: Sizes of the parts in bytes.
    """

    model: str
    revision: str = ""
    fingerprint: str = ""
    dialect: Literal["vllm", "transformers"]
    engine: Literal["auto", "vllm", "local"] = "auto"
    kind: Literal["trace", "session"] = "trace"
    codec: Literal["wire", "cloudpickle"] = "wire"
    groups: Annotated[list[dict[str, int]], msgspec.Meta(max_length=_MAX_ITEMS)] = []
    invokes: Annotated[list[SentInvoke], msgspec.Meta(max_length=_MAX_ITEMS)] = []
    method: str = ""
    num_edits: Count = 0
    wanted: Annotated[list[str], msgspec.Meta(max_length=_MAX_ITEMS)] = []
    streams: bool = False
    local_parts: bool = False
    accepts: Annotated[list[str], msgspec.Meta(max_length=16)] = []
    python: str = msgspec.field(default_factory=platform.python_version)
    client: str = ""
    parts: Annotated[list[Count], msgspec.Meta(max_length=_MAX_ITEMS)] = []


class _LargeHead(TraceHead, frozen=True, kw_only=True):
    """A head whose long parts have not been read."""

    groups: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_ITEMS)] = []  # type: ignore[assignment] # that is the purpose
    invokes: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_ITEMS)] = []  # type: ignore[assignment] # the same


class _Prompt(msgspec.Struct):
    """A request of which nothing has been read."""

    prompt: msgspec.Raw


def _head(data: memoryview) -> TraceHead:
    """Read a head; a large one in pieces, of which none may be large but a prompt."""
    if len(data) <= _LARGE_HEAD_BYTES:
        return msgspec.json.decode(data, type=TraceHead)
    head = msgspec.json.decode(data, type=_LargeHead)
    sizes = [_num_bytes(raw) for raw in head.groups]
    sizes += [
        _num_bytes(raw) - _num_bytes(msgspec.json.decode(raw, type=_Prompt).prompt) for raw in head.invokes
    ]
    if max(sizes, default=0) > _MAX_PIECE_BYTES or sum(sizes) > _MAX_PIECES_BYTES:
        raise DecodeError(
            "the trace's head is too large: a block's variables, and a request beside its prompt, may have "
            f"{_MAX_PIECE_BYTES:,} bytes, and all of them {_MAX_PIECES_BYTES:,}; the largest has "
            f"{max(sizes):,}, all have {sum(sizes):,}"
        )
    fields = msgspec.structs.asdict(head)
    fields["groups"] = [msgspec.json.decode(raw, type=dict[str, int]) for raw in head.groups]
    fields["invokes"] = [msgspec.json.decode(raw, type=SentInvoke) for raw in head.invokes]
    return TraceHead(**fields)


def _num_bytes(raw: Any) -> int:
    return len(memoryview(raw))


class TraceRequest:
    """A head and its parts.

    Attributes:
        head: What a server has to know.
        parts: The blocks, then edits.
        sender: Who sent it, as the server knows them, so that nobody's traces keep others waiting; set by
            the server and not sent.
        tenant: Whose share of the engine it takes; empty where nobody shares it. Not sent either.
        ask: How the server asks its client to run a part of a block: it sends bytes, bytes come in answer,
            or TimeoutError where nobody answers. None where nobody can be asked; not sent either.
        sandbox_of: In whose sandbox its code runs, as the server knows them; nothing where the sender is
            trusted. Set by the server and not sent.
        is_patient: Whether it waits for its turn however many of its sender's do already; likewise.
    """

    __slots__ = ("ask", "head", "is_patient", "parts", "sandbox_of", "sender", "tenant")

    def __init__(self, head: TraceHead, parts: Sequence[bytes | memoryview]) -> None:
        """Put them together; the head learns the parts' sizes."""
        self.head = msgspec.structs.replace(head, parts=[len(part) for part in parts])
        self.parts = list(parts)
        self.sender = ""
        self.sandbox_of = ""
        self.tenant = ""
        self.ask: Ask | None = None
        self.is_patient = False

    @property
    def blocks(self) -> bytes | memoryview:
        """The message that holds the blocks."""
        return self.parts[0]

    def chunks(self) -> list[bytes | memoryview]:
        """Return the message as pieces to be sent one after another."""
        head = msgspec.json.encode(self.head)
        return [_START.pack(MAGIC, VERSION, len(head)), head, *self.parts]

    def to_bytes(self) -> bytes:
        """Return the message."""
        return b"".join(self.chunks())

    @staticmethod
    def is_slow(data: bytes | bytearray | memoryview) -> bool:
        """Tell whether reading a message takes so long that an event loop has it done on a thread."""
        return len(data) >= _START.size and _START.unpack_from(data)[2] > _LARGE_HEAD_BYTES

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> TraceRequest:
        """Read a message; its parts are views of ``data``.

        Raises:
            DecodeError: It is none, of another version, or broken.
        """
        view = memoryview(data)
        if len(view) < _START.size or bytes(view[:4]) != MAGIC:
            raise DecodeError(f"these {len(view):,} bytes are no trace: one begins with {MAGIC!r}")
        _, version, size = _START.unpack_from(view)
        if version != VERSION:
            older = "the client" if version < VERSION else "the server"
            raise DecodeError(
                f"the trace has version {version} of the message and the server reads version {VERSION}: "
                f"{older} is older and wants an upgrade of nnsight-engine"
            )
        if size > min(_MAX_HEAD_BYTES, len(view) - _START.size):
            raise DecodeError(f"the trace is broken: its head has {size:,} bytes, more than there are")
        rest = view[_START.size + size :]
        try:
            head = _head(view[_START.size : _START.size + size])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"the trace's head is broken: {error}") from error
        if not head.parts or sum(head.parts) != len(rest):
            raise DecodeError("the trace is broken: its parts have other sizes than its head says")
        parts, at = [], 0
        for part in head.parts:
            parts.append(rest[at : at + part])
            at += part
        for edit in (edit for invoke in head.invokes for edit in invoke.edits):
            if not 0 < edit.part < len(parts):
                raise DecodeError(f"the trace is broken: the edit {edit.name!r} is in none of its parts")
        return TraceRequest(head, parts)


__all__ = ["MAGIC", "MEDIA_TYPE", "VERSION", "SentEdit", "SentInvoke", "TraceHead", "TraceRequest"]
