"""The request that carries a trace: a JSON head, enough to route it, then parts; see ``docs/remote.md``.

The model is identified by its name, or a fingerprint of its config's shape.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from nnsight_engine.serialization import DecodeError

MEDIA_TYPE: Final = "application/vnd.nnsight.trace"
MAGIC: Final = b"NNSR"
VERSION: Final = 1
_START: Final = struct.Struct("<4sBxxxI")
_MAX_HEAD_BYTES: Final = 16 * 2**20
_LARGE_HEAD_BYTES: Final = 256 * 2**10
"""A larger head is parsed piece by piece, because one call of the JSON parser holds the GIL until it
returns."""
_MAX_PIECE_BYTES: Final = 256 * 2**10
"""Limit for the variables of one block, and for one request without its prompt."""
_MAX_PIECES_BYTES: Final = 4 * 2**20
"""Limit for all of these pieces together."""
_MAX_ITEMS: Final = 4096
"""Limit for the number of blocks, of requests, of wanted names, and of parts in one trace."""
ClientCall = Callable[
    [bytes | bytearray | memoryview], AbstractAsyncContextManager[bytes | bytearray | memoryview]
]
Count = Annotated[int, msgspec.Meta(ge=0)]


class SentEdit(msgspec.Struct, frozen=True, kw_only=True):
    """An edit that runs beside a request's block; ``part`` is the index of its message part."""

    name: str
    digest: str
    part: Count


class SentInvoke(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace on vLLM; ``sampling`` includes the parameters of the whole trace."""

    prompt: str | list[Count]
    sampling: dict[str, Any] = {}
    edits: list[SentEdit] = []


class TraceHead(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a trace; unknown fields from newer clients are ignored.

    Attributes:
        model: The model of the blocks: a repository's name, a folder, or the server's name for its model.
        fingerprint: Fingerprint of the model's shape, see ``fingerprint_of``; empty if the client has none.
        dialect: Module names that the blocks use: vLLM's or those of the transformers library.
        groups: For each block, its variables by name, and the number of the surrounding variable of each.
        invokes: On vLLM, the requests, one for each block.
        method: On transformers, the traced method of the module; empty for a call of the module.
        num_edits: Number of blocks that are edits; they are the last ones.
        wanted: Names to return although they were not saved, because later traces of a session use them.
        local_parts: Whether the client can run parts of its blocks, over its job's WebSocket.
        accepts: Compression codecs that the client accepts for results: ``zstd``.
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
    groups: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_ITEMS)] = []  # type: ignore[assignment] # deliberately unparsed
    invokes: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_ITEMS)] = []  # type: ignore[assignment] # the same


class _Prompt(msgspec.Struct):
    prompt: msgspec.Raw


def _head(data: memoryview) -> TraceHead:
    """Parse a head; parse a large one piece by piece, where no piece but a prompt may be large."""
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
    """A request to run a trace; attributes after ``parts`` are set by the server and not sent.

    Attributes:
        parts: The blocks, then edits.
        sender: The sender, for fair scheduling between senders.
        tenant: The tenant whose share of the engine is used; empty if the engine is not shared.
        call_client: Has the client run a part of a block: takes bytes, and gives those of the answer for the
            length of a block, or raises TimeoutError. None if the client cannot be called.
        sandbox_of: The tenant in whose sandbox the code runs; None if the sender is trusted. There is no
            default: a server that has not set it cannot run the trace.
        may_exceed_queue: Whether the request waits for its turn however many of its sender's are waiting.
    """

    __slots__ = ("call_client", "head", "may_exceed_queue", "parts", "sandbox_of", "sender", "tenant")

    def __init__(self, head: TraceHead, parts: Sequence[bytes | memoryview]) -> None:
        """Create a request; the sizes of the parts are stored in a copy of the head."""
        self.head = msgspec.structs.replace(head, parts=[len(part) for part in parts])
        self.parts = list(parts)
        self.sender = ""
        self.sandbox_of: str | None
        self.tenant = ""
        self.call_client: ClientCall | None = None
        self.may_exceed_queue = False

    @property
    def blocks(self) -> bytes | memoryview:
        return self.parts[0]

    def chunks(self) -> list[bytes | memoryview]:
        head = msgspec.json.encode(self.head)
        return [_START.pack(MAGIC, VERSION, len(head)), head, *self.parts]

    def to_bytes(self) -> bytes:
        return b"".join(self.chunks())

    @staticmethod
    def is_slow(data: bytes | bytearray | memoryview) -> bool:
        """Return whether parsing is slow enough that an event loop should run it on a thread."""
        return len(data) >= _START.size and _START.unpack_from(data)[2] > _LARGE_HEAD_BYTES

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> TraceRequest:
        """Parse a message, whose parts become views of ``data``; ``DecodeError`` if it is malformed."""
        view = memoryview(data)
        if len(view) < _START.size or bytes(view[:4]) != MAGIC:
            raise DecodeError(f"these {len(view):,} bytes are no trace: one begins with {MAGIC!r}")
        _, version, size = _START.unpack_from(view)
        if version != VERSION:
            older = "the client" if version < VERSION else "the server"
            raise DecodeError(
                f"the trace has version {version} of the message and the server reads version {VERSION}: "
                f"{older} is older; upgrade its nnsight-engine"
            )
        if size > min(_MAX_HEAD_BYTES, len(view) - _START.size):
            raise DecodeError(f"the trace is broken: its head has {size:,} bytes, more than there are")
        body = view[_START.size + size :]
        try:
            head = _head(view[_START.size : _START.size + size])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"the trace's head is broken: {error}") from error
        if not head.parts or sum(head.parts) != len(body):
            raise DecodeError("the trace is broken: its parts have other sizes than its head says")
        parts, offset = [], 0
        for part_bytes in head.parts:
            parts.append(body[offset : offset + part_bytes])
            offset += part_bytes
        for edit in (edit for invoke in head.invokes for edit in invoke.edits):
            if not 0 < edit.part < len(parts):
                raise DecodeError(f"the trace is broken: the edit {edit.name!r} is in none of its parts")
        return TraceRequest(head, parts)


_FIELDS: Final = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def fingerprint_of(config: Any) -> str:
    text = config.get_text_config()
    shape = {name: _stated(text, name) for name in _FIELDS}
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def _stated(text: Any, name: str) -> Any:
    """Return a field of a text config; a list where layers differ in it (Gemma 4), None if it is missing."""
    if name in (getattr(text, "per_layer_attributes", None) or ()):
        return [getattr(layer, name) for layer in text.per_layer_config]
    return getattr(text, name, None)


def fingerprint_of_folder(folder: str) -> str:
    """Return the shape hash of the model in a local folder; an empty string if there is no model."""
    from transformers import AutoConfig  # noqa: PLC0415 - status queries should not import transformers

    try:
        config = AutoConfig.from_pretrained(folder)  # nosec B615 # a local folder
    except (OSError, ValueError):
        return ""
    return fingerprint_of(config)


def name_of(source: str) -> str:
    """Return the name by which a server knows a model: its repository name, or a folder's absolute path."""
    path = Path(source).expanduser()
    return str(path.absolute()) if path.is_dir() else source
