"""The messages between a worker and a sandbox process: a msgpack header, followed by raw bytes.

The worker sends requests and the process answers; before it answers it may request calls of modules. Data
from a sandbox is hostile until it has been validated here: headers are decoded into exactly these types, and
tensors are made from a copy of their bytes after their sizes have been checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch

from nnsight_engine.core.tensor_bytes import flat_bytes
from nnsight_engine.sandbox.errors import SandboxEndedError

_LENGTH: Final = struct.Struct("<I")
_MAX_DIMS: Final = 16
_MAX_ITEMS: Final = 50_000
"""Enough for the places that a cache of a whole model may watch."""
_MAX_ARGUMENTS: Final = 64
_MAX_HEAD_BYTES: Final = 16 * 2**20
_T = TypeVar("_T")
_Many = Annotated[list[_T], msgspec.Meta(max_length=_MAX_ITEMS)]
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


class ValueSlot(msgspec.Struct, frozen=True, tag=True):
    """A tensor, whose bytes follow the header, in the order of the slots.

    Attributes:
        dtype: The dtype's name.
        shape: The tensor's shape.
        number: The number of the tensor of a value that it replaces.
    """

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=_MAX_DIMS)]
    number: int = 0


Plain = None | bool | int | float | str
Argument = ValueSlot | Plain


# Messages of the worker.


class PassedPlaces(msgspec.Struct, frozen=True):
    """The places that the model has passed in a step.

    Attributes:
        same: The number of leading places that equal those of the previous step.
        more: The places after these.
    """

    same: int = 0
    more: list[str] = []


class BeginRequests(msgspec.Struct, frozen=True, tag=True):
    """Requests arrived; no bytes follow the header."""

    arrived: list[tuple[str, Any]]


class StepMessage(msgspec.Struct, frozen=True, tag=True):
    """A step begins.

    Attributes:
        spans: For each request: its id, number of rows, position of the first row, and whether a token is
            sampled after the step.
        finished: Requests that have ended since the last step.
        passed: The places that the model passed in the last step after the process was done with it.
    """

    spans: list[tuple[str, int, int, bool]]
    finished: list[str]
    passed: PassedPlaces


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The model has reached a place; the value's bytes follow the header.

    Attributes:
        provider: The place.
        passed: The places that the model has passed before it.
        is_after_model: Whether values have one row per request there.
        slots: Slots of the value, if it is a tensor or a tuple of tensors; None if it is encoded by
            ``serialization``.
        is_tuple: Whether it is a tuple.
    """

    provider: str
    passed: PassedPlaces
    is_after_model: bool
    slots: list[ValueSlot] | None = None
    is_tuple: bool = False


class InvalidValue(msgspec.Struct, frozen=True, tag=True):
    """The value at a place cannot be given to a sandbox process, with the error to raise in its blocks."""

    provider: str
    passed: PassedPlaces
    error: dict[str, Any]


class End(msgspec.Struct, frozen=True, tag=True):
    """The step has ended."""

    passed: PassedPlaces


class CallResult(msgspec.Struct, frozen=True, tag=True):
    """The result of a module call, encoded by ``serialization`` behind the header, or the call's error."""

    error: dict[str, Any] | None = None


class Collect(msgspec.Struct, frozen=True, tag=True):
    """The trace has ended: request for its saved values."""

    key: str
    results: dict[str, Any]
    finished: list[str]


ToSandbox = BeginRequests | StepMessage | Offer | InvalidValue | End | CallResult | Collect


# Messages of the sandbox process.


class SandboxReply(msgspec.Struct, frozen=True):
    """Reports of a request, see ``reporting``."""

    request_id: str
    index: int
    data: bytes | None
    printed: str


class ContinueReply(msgspec.Struct, frozen=True, tag=True):
    """The answer that lets the model continue.

    Attributes:
        wanted: The places at which to stop; None for the same as before.
        changes: Slots of the tensors that replace others of the value at hand.
        ended: Requests that are to end.
        reports: Reports of requests.
        live: The requests whose blocks still take part in steps; None except in answers to ``BeginRequests``.
        is_over: Whether the process needs no further place of the running step, and has ended it.
    """

    wanted: _Many[str] | None = None
    changes: _Many[ValueSlot] = []
    ended: _Many[str] = []
    reports: _Many[SandboxReply] = []
    live: _Many[str] | None = None
    is_over: bool = False


class CallRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to call a module on values of a block's own."""

    path: str
    args: Annotated[list[Argument], msgspec.Meta(max_length=_MAX_ARGUMENTS)]
    kwargs: Annotated[dict[str, Argument], msgspec.Meta(max_length=_MAX_ARGUMENTS)]


class Collected(msgspec.Struct, frozen=True, tag=True):
    """The saved values follow the header.

    Attributes:
        printed: The remaining printed text.
        failure: The text of a failure.
        is_clean: Whether the blocks have left nothing behind that the next trace would meet.
    """

    printed: str
    failure: str
    is_clean: bool = True


_to_sandbox = msgspec.msgpack.Decoder(ToSandbox)
_to_worker = msgspec.msgpack.Decoder(ContinueReply | CallRequest | Collected)
_encoder = msgspec.msgpack.Encoder()


def packed(head: msgspec.Struct, body: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """Return a message as parts."""
    data = _encoder.encode(head)
    return [_LENGTH.pack(len(data)), data, *body]


def read_by_sandbox(data: bytes) -> tuple[ToSandbox, memoryview]:
    """Decode a message of the worker."""
    head, body = _parted(data)
    return _to_sandbox.decode(head), body


def read_by_worker(data: bytes) -> tuple[ContinueReply | CallRequest | Collected, memoryview]:
    """Decode a message of a sandbox process.

    Raises:
        SandboxEndedError: The message is not valid.
    """
    try:
        head, body = _parted(data)
        if len(head) > _MAX_HEAD_BYTES:
            raise SandboxEndedError.broken("its answer was longer than any may be")
        return _to_worker.decode(head), body
    except (msgspec.DecodeError, struct.error, UnicodeError, RecursionError) as error:
        raise SandboxEndedError.broken(f"it sent no answer ({type(error).__name__})") from error


def _parted(data: bytes) -> tuple[memoryview, memoryview]:
    view = memoryview(data)
    (length,) = _LENGTH.unpack_from(view)
    return view[_LENGTH.size : _LENGTH.size + length], view[_LENGTH.size + length :]


def slot_of(
    tensor: torch.Tensor, number: int = 0, *, max_bytes: int | None = None
) -> tuple[ValueSlot, memoryview]:
    """Return the slot of a host tensor, and its bytes.

    Args:
        tensor: The tensor.
        number: See ``ValueSlot``.
        max_bytes: Limit for its size when it is written out.

    Raises:
        TypeError: Its dtype or layout cannot be sent, it has no data, or it is too large.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype} ({tensor.layout}) does not leave the sandbox")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no numbers that could leave the sandbox")
    if max_bytes is not None and tensor.nbytes > max_bytes:
        raise TypeError(
            f"a tensor of {tensor.nbytes:,} bytes, and {max_bytes:,} may leave the sandbox at once"
        )
    return ValueSlot(name, list(tensor.shape), number), flat_bytes(tensor.cpu()).numpy().data


def slots_of(value: Any) -> tuple[list[ValueSlot], bool, list[bytes | memoryview]] | None:
    """Return the slots of a tensor or a tuple of tensors, whether it is a tuple, and the tensors' bytes.

    Returns None for other values, and for tuples that contain the same tensor twice, which ``serialization``
    must encode.
    """
    parts = value if type(value) is tuple else (value,)
    if len(set(map(id, parts))) < len(parts) or not all(map(_is_simple, parts)):
        return None
    pairs = list(map(slot_of, parts))
    return [slot for slot, _ in pairs], parts is value, [body for _, body in pairs]


def _is_simple(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and value.dtype in _NAMES


class Tensors:
    """Makes tensors from the bytes behind a header.

    Args:
        body: Bytes that no other code writes to.
    """

    def __init__(self, body: memoryview) -> None:
        self._body = body

    def end(self) -> None:
        """Check that no bytes are left.

        Raises:
            SandboxEndedError: There are bytes that belong to no tensor.
        """
        if self._body:
            raise SandboxEndedError.broken("it sent bytes that nobody asked for")

    def next(self, slot: ValueSlot) -> torch.Tensor:
        """Return the next tensor.

        Raises:
            SandboxEndedError: The slot is invalid, or there are not enough bytes.
        """
        dtype = _DTYPES.get(slot.dtype)
        if dtype is None or len(slot.shape) > _MAX_DIMS or any(size < 0 for size in slot.shape):
            raise SandboxEndedError.broken("it sent a tensor that there cannot be")
        num_bytes = math.prod(slot.shape) * dtype.itemsize
        if num_bytes > len(self._body):
            raise SandboxEndedError.broken("it sent a tensor without its bytes")
        part, self._body = self._body[:num_bytes], self._body[num_bytes:]
        if not num_bytes:
            return torch.empty(slot.shape, dtype=dtype)
        return torch.frombuffer(bytearray(part), dtype=torch.uint8).view(dtype).reshape(slot.shape)


__all__ = [
    "Argument",
    "BeginRequests",
    "CallRequest",
    "CallResult",
    "Collect",
    "Collected",
    "ContinueReply",
    "End",
    "InvalidValue",
    "Offer",
    "PassedPlaces",
    "SandboxReply",
    "StepMessage",
    "Tensors",
    "ToSandbox",
    "ValueSlot",
    "packed",
    "read_by_sandbox",
    "read_by_worker",
    "slot_of",
    "slots_of",
]
