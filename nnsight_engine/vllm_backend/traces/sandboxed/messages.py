"""The messages between a worker and a sandbox process, beside those of all roads (``traces.messages``).

Before the process answers it may request calls of modules. Data from it is hostile until it has been
validated here and in ``traces.messages``.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final, TypeVar

import msgspec

from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.vllm_backend.traces.messages import (
    CallResult,
    Continue,
    End,
    InvalidValue,
    Offer,
    PassedPlaces,
    ValueSlot,
    parted,
    unpacked,
)

_MAX_ITEMS: Final = 50_000
"""Enough for the places that a cache of a whole model may watch."""
_MAX_ARGUMENTS: Final = 64
_MAX_HEAD_BYTES: Final = 16 * 2**20

_T = TypeVar("_T")
_Many = Annotated[list[_T], msgspec.Meta(max_length=_MAX_ITEMS)]
Plain = None | bool | int | float | str
Argument = ValueSlot | Plain


# Messages of the worker.


class BeginRequests(msgspec.Struct, frozen=True, tag=True):
    arrived: list[tuple[str, Any]]


class StepMessage(msgspec.Struct, frozen=True, tag=True):
    """A step begins; ``passed`` are places passed in the last step after the process was done with it.

    A span is a request's id, number of rows, first position, and whether a token is sampled after the step.
    """

    spans: list[tuple[str, int, int, bool]]
    finished: list[str]
    passed: PassedPlaces


class Collect(msgspec.Struct, frozen=True, tag=True):
    key: str
    results: dict[str, Any]
    finished: list[str]


ToSandbox = BeginRequests | StepMessage | Offer | InvalidValue | End | CallResult | Collect


# Messages of the sandbox process.


class SandboxReply(msgspec.Struct, frozen=True):
    request_id: str
    index: int
    data: bytes | None
    printed: str


class ContinueReply(Continue, frozen=True, tag=True):
    """The answer that lets the model continue, with reports; all its lists are bounded.

    ``ended`` requests are to end. ``live`` are those whose blocks still take part in steps, None except in
    answers to ``BeginRequests``. With ``is_over`` the process needs no further place of the step, and has
    ended it.
    """

    wanted: _Many[str] | None = None
    changes: _Many[ValueSlot] = msgspec.field(default_factory=list)
    ended: _Many[str] = msgspec.field(default_factory=list)
    reports: _Many[SandboxReply] = msgspec.field(default_factory=list)
    live: _Many[str] | None = None
    is_over: bool = False


class CallRequest(msgspec.Struct, frozen=True, tag=True):
    path: str
    args: Annotated[list[Argument], msgspec.Meta(max_length=_MAX_ARGUMENTS)]
    kwargs: Annotated[dict[str, Argument], msgspec.Meta(max_length=_MAX_ARGUMENTS)]


class Collected(msgspec.Struct, frozen=True, tag=True):
    """The saved values follow; ``is_clean`` if the blocks left nothing that the next trace would meet."""

    printed: str
    failure: str
    is_clean: bool = True


_to_sandbox: Final[msgspec.msgpack.Decoder[ToSandbox]] = msgspec.msgpack.Decoder(ToSandbox)
_to_worker = msgspec.msgpack.Decoder(ContinueReply | CallRequest | Collected)


def read_by_sandbox(data: bytes) -> tuple[ToSandbox, memoryview]:
    return unpacked(data, _to_sandbox)


def read_by_worker(data: bytes) -> tuple[ContinueReply | CallRequest | Collected, memoryview]:
    """Decode a message of a sandbox process; SandboxEndedError if it is not valid."""
    try:
        head, body = parted(data)
        if len(head) > _MAX_HEAD_BYTES:
            raise SandboxEndedError.broken("its answer was longer than any may be")
        return _to_worker.decode(head), body
    except (msgspec.DecodeError, struct.error, UnicodeError, RecursionError) as error:
        raise SandboxEndedError.broken(f"it sent no answer ({type(error).__name__})") from error
