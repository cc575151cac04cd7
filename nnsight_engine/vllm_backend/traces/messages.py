"""Messages between the code that has the model's values and the blocks, where these run elsewhere.

Three roads have a transport and a few messages of their own: ``stages``, ``sandboxed``, ``ranks``. A message
is a msgpack header of one of these types, and raw bytes: tensors in the order of their slots, or a serialized
value. Headers are decoded into exactly these types, and tensors are made from a copy of their bytes after
their sizes have been checked, so messages of a sandbox process, which are hostile, may be read here.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch

from nnsight_engine.core.tensors import flat_bytes
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization import decode
from nnsight_engine.serialization.message import Piece
from nnsight_engine.serialization.wire import encode_pieces
from nnsight_engine.vllm_backend.traces.row_payloads import Form, RowsPlaceholder


@dataclasses.dataclass(frozen=True, slots=True)
class StepFacts:
    """A step, as scheduled, which every rank and stage derives alike from the scheduler's output.

    Whether they exchange messages in a step depends on these facts only: whether a block still waits is known
    to one worker, so it must not decide whether the others wait for a message.

    ``bound`` are requests whose rows cannot be computed again; for ``bound_once_begun`` this holds once their
    trace has a sandbox process.
    """

    arrived: Sequence[tuple[str, Any]] = ()
    finished: Collection[str] = ()
    scheduled: Collection[str] = ()
    is_single_tenant: bool = False
    bound: Collection[str] = ()
    bound_once_begun: Collection[str] = ()


class KnownRequests:
    """The traced requests that have arrived and not ended, whether their blocks still run or not."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.sandboxed: set[str] = set()

    def note(self, facts: StepFacts) -> bool:
        """Record the requests that arrived and finished; return whether there are any."""
        gone = self.present.intersection(facts.finished)
        self.present -= gone
        self.sandboxed -= gone
        for request_id, plain in facts.arrived:
            self.present.add(request_id)
            if isinstance(plain, dict) and plain.get("sandbox_of"):
                self.sandboxed.add(request_id)
        return bool(gone or facts.arrived)


_LENGTH: Final = struct.Struct("<I")
_MAX_DIMS: Final = 16
_HeadT = TypeVar("_HeadT")
ALL_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""The dtypes of tensors on trusted roads, by name."""
DTYPES: Final = {
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
"""The dtypes of tensors from and to a sandbox process, by name."""


class ValueSlot(msgspec.Struct, frozen=True, tag=True):
    """A tensor, whose bytes follow the header; ``number`` is that of the tensor that it replaces.

    With ``is_apart`` its bytes do not follow: ranks exchange tensors on their devices by a collective.
    """

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=_MAX_DIMS)]
    number: int = 0
    is_apart: bool = False


class PassedPlaces(msgspec.Struct, frozen=True):
    """The places that a step has passed: the first ``same`` of the previous step, then ``more``."""

    same: int = 0
    more: list[str] = []


# From the model to the blocks.


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The model has reached a place; its value follows, as tensors of ``slots`` or by ``serialization``.

    It has the rows of traced requests, or one row for each ``is_after_model``. ``forms`` are those of its
    tensors on the other side, of which a sandbox process knows nothing.
    """

    provider: str
    passed: PassedPlaces
    slots: list[ValueSlot] | None = None
    is_tuple: bool = False
    is_after_model: bool = False
    forms: list[Form] = []


class InvalidValue(msgspec.Struct, frozen=True, tag=True):
    provider: str
    passed: PassedPlaces
    error: dict[str, Any]


class End(msgspec.Struct, frozen=True, tag=True):
    passed: PassedPlaces


class CallResult(msgspec.Struct, frozen=True, tag=True):
    error: dict[str, Any] | None = None


# From the blocks to the model.


class Continue(msgspec.Struct, frozen=True, tag=True):
    """Let the model continue until ``wanted`` (None: as before); ``changes`` replace tensors at hand."""

    wanted: list[str] | None = None
    changes: list[ValueSlot] = []


class CallOrder(msgspec.Struct, frozen=True, tag=True):
    """The order of trusted blocks to call a module; ``(args, kwargs)`` follow, encoded by ``serialization``.

    ``method`` is empty for the module itself; the arguments refer to the tensors in ``slots`` by number.
    """

    path: str
    method: str = ""
    slots: list[ValueSlot] = []
    adapter: int | None = None


# Encoding.

_encoder = msgspec.msgpack.Encoder()


def packed(head: msgspec.Struct, body: Sequence[Piece] = ()) -> list[Piece]:
    data = _encoder.encode(head)
    return [_LENGTH.pack(len(data)), data, *body]


def parted(data: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """Return the bytes of a message's header, and those behind it; struct.error if it is too short."""
    view = memoryview(data)
    (length,) = _LENGTH.unpack_from(view)
    return view[_LENGTH.size : _LENGTH.size + length], view[_LENGTH.size + length :]


def unpacked(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_HeadT]) -> tuple[_HeadT, memoryview]:
    """Return the header of a message of a trusted sender, and the bytes behind it."""
    head, body = parted(data)
    return decoder.decode(head), body


def slot_of(
    tensor: torch.Tensor,
    number: int = 0,
    *,
    max_bytes: int | None = None,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
) -> tuple[ValueSlot, memoryview]:
    """Return the slot of a host tensor, and its bytes; TypeError if it is too large or cannot be sent.

    ``number`` is that of the tensor which it replaces at the receiver.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in dtypes or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype} ({tensor.layout}) does not leave the block's process")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no numbers that could leave the block's process")
    if max_bytes is not None and tensor.nbytes > max_bytes:
        raise TypeError(
            f"a tensor of {tensor.nbytes:,} bytes, and {max_bytes:,} may leave the sandbox at once"
        )
    return ValueSlot(name, list(tensor.shape), number), flat_bytes(tensor.cpu()).numpy().data


def slots_of(value: Any) -> tuple[list[ValueSlot], bool, list[bytes | memoryview]] | None:
    """Return the slots of a tensor or a tuple of tensors, whether it is a tuple, and the bytes.

    None if ``serialization`` must encode the value: any other one, or a tuple with the same tensor twice.
    """
    parts = value if type(value) is tuple else (value,)
    if len(set(map(id, parts))) < len(parts) or not all(map(_is_simple, parts)):
        return None
    pairs = list(map(slot_of, parts))
    return [slot for slot, _ in pairs], parts is value, [body for _, body in pairs]


def _is_simple(value: Any) -> bool:
    """Return whether a value is a tensor whose bytes can be sent as they are."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and str(value.dtype).removeprefix("torch.") in DTYPES
    )


def packed_value(value: Any) -> tuple[list[ValueSlot] | None, bool, Sequence[Piece]]:
    """Return the slots, or None for a value that is serialized, whether it is a tuple, and the bytes.

    Objects that stay here have been replaced by ``RowsPlaceholder``, and are sent as names.
    """
    return slots_of(value) or (None, False, encode_pieces(value, reference=RowsPlaceholder.reference))


def unpacked_value(head: Offer, body: memoryview, resolve: Callable[[tuple[str, ...]], Any]) -> Any:
    """Return the value of an ``Offer``; ``resolve`` returns what stands for an object that is not sent."""
    if head.slots is None:
        return decode(bytearray(body), resolve=resolve)
    leaves = list(map(Tensors(body).next, head.slots))
    return tuple(leaves) if head.is_tuple else leaves[0]


class Tensors:
    """Makes tensors from the bytes behind a header, to which no other code may write."""

    def __init__(self, body: memoryview, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        self._body = body
        self._dtypes = dtypes

    def rest(self) -> memoryview:
        return self._body

    def check_end(self) -> None:
        """Raise SandboxEndedError if there are bytes that belong to no tensor."""
        if self._body:
            raise SandboxEndedError.broken("it sent bytes that nobody asked for")

    def next(self, slot: ValueSlot) -> torch.Tensor:
        """Return the next tensor; SandboxEndedError if the slot is invalid, or there are not enough bytes."""
        dtype = self._dtypes.get(slot.dtype)
        if dtype is None or len(slot.shape) > _MAX_DIMS or any(size < 0 for size in slot.shape):
            raise SandboxEndedError.broken("it sent a tensor that there cannot be")
        num_bytes = math.prod(slot.shape) * dtype.itemsize
        if num_bytes > len(self._body):
            raise SandboxEndedError.broken("it sent a tensor without its bytes")
        part, self._body = self._body[:num_bytes], self._body[num_bytes:]
        if not num_bytes:
            return torch.empty(slot.shape, dtype=dtype)
        return torch.frombuffer(bytearray(part), dtype=torch.uint8).view(dtype).reshape(slot.shape)
