"""The results and deltas of a block of the operation ``trace``, decoded and converted to JSON types.

The bytes may come from a sandbox process that runs untrusted code: they are decoded as data only,
uncompressed, with limits on their size. Malformed ones (``saved_deltas.MALFORMED``) fail only the request
that they belong to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from nnsight_engine.core.tensors import DTYPES, tensor_to_bytes
from nnsight_engine.plans.collect.results import TensorResult
from nnsight_engine.remote_backend.saved_deltas import DeltaReader, checked_list, values_by_name
from nnsight_engine.remote_backend.values.outcomes import warnings_of
from nnsight_engine.serialization import DecodeError, MessageLimits, Policy, decode
from nnsight_engine.tracing.blocks import NUM_LINES_BEFORE
from nnsight_engine.vllm_backend.json_values import NotPlainError, SaveBudget, plain_saves

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.running_trace import TraceEvent

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_AS_INT64: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32})
MAX_DELTA_BYTES: Final = 256 * 2**20
_DELTA_LIMITS: Final = MessageLimits(max_bytes=MAX_DELTA_BYTES, max_nodes=1_000_000, compressed=False)
_RESULT_LIMITS: Final = MessageLimits(compressed=False)
_PLAIN: Final = Policy(lambda _module, _name: False)
"""Values are plain, so no class is needed, and importing one would cost this process time and memory."""
_MAX_ENTRIES: Final = 64
_MAX_NOTES: Final = 16
_MAX_TEXT: Final = 10_000
"""Characters of one part of an error's message."""


class _Entry(msgspec.Struct):
    file: str
    line: int
    source: str


class BlockError(msgspec.Struct):
    """The reported parts of an error, in fixed types: formatting a deeply nested list may take forever."""

    name: str
    message: str
    notes: list[str] = []
    entries: list[_Entry] = []

    @classmethod
    def of(cls, error: Any) -> BlockError:
        """Return a decoded error, with parts of limited length; raise DecodeError if it is no error."""
        if type(error) is not dict:
            raise DecodeError("its error has no parts")
        parts = {name: error[name] for name in ("name", "message") if name in error}
        for name, maximum in (("notes", _MAX_NOTES), ("entries", _MAX_ENTRIES)):
            if type(error.get(name)) is list:
                parts[name] = error[name][-maximum:]
        try:
            block_error = msgspec.convert(parts, cls)
        except msgspec.ValidationError as invalid:
            raise DecodeError(f"its error has parts of other types: {invalid}") from invalid
        block_error.name, block_error.message = block_error.name[:_MAX_TEXT], block_error.message[:_MAX_TEXT]
        block_error.notes = [note[:_MAX_TEXT] for note in block_error.notes]
        return block_error

    def description(self, filename: str) -> str:
        """Return the line that failed, one in ``filename`` if possible, and the error."""
        notes = "".join(f" {note}" for note in self.notes)
        return f"{self._line(filename)}: {self.name}: {self.message}{notes}"

    def _line(self, filename: str) -> str:
        """Return where the error was raised: its last line in ``filename``, or else its last one."""
        for entry in reversed(self.entries):
            if entry.file == filename:
                return f" in line {entry.line - NUM_LINES_BEFORE}, `{entry.source[:_MAX_TEXT].strip()}`"
        if self.entries:
            last = self.entries[-1]
            source = last.source[:_MAX_TEXT].strip()
            return f" in {last.file[:_MAX_TEXT]}, line {last.line}, `{source}`"
        return ""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockResult:
    choice: int
    saves: dict[str, Any]
    warnings: tuple[str, ...]
    error: BlockError | None


def read_results(data: bytes | memoryview, results: Mapping[str, Any], num_choices: int) -> list[BlockResult]:
    """Decode the results of a trace; raise DecodeError, or another exception of ``MALFORMED``."""
    message = decode(
        data,
        resolve=lambda reference: results.get("/".join(reference[1:])),
        policy=_PLAIN,
        limits=_RESULT_LIMITS,
    )
    blocks = checked_list(message["blocks"])
    if len(blocks) > num_choices:
        raise DecodeError("it has more blocks than choices")
    return [_result(block, num_choices) for block in blocks]


def _result(block: Any, num_choices: int) -> BlockResult:
    """Check the decoded results of a block, which may come from untrusted code; raise DecodeError."""
    choice, error = block["choice"], block["error"]
    if type(choice) is not int or not 0 <= choice < num_choices:
        raise DecodeError("a block has no choice")
    if error is not None:
        return BlockResult(choice, {}, (), BlockError.of(error))
    return BlockResult(choice, values_by_name(block["saves"]), warnings_of(block), None)


@dataclasses.dataclass(slots=True)
class ChoiceValues:
    """The events of one choice since the last chunk and, once it has ended, its saved values.

    None among the ``deltas`` is in place of values that were dropped; ``num_pending`` is their size in bytes.
    """

    deltas: list[bytes | None] = dataclasses.field(default_factory=list)
    num_pending: int = 0
    printed: list[str] = dataclasses.field(default_factory=list)
    reader: DeltaReader = dataclasses.field(default_factory=lambda: DeltaReader(_PLAIN, _DELTA_LIMITS))
    saves: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def add_event(self, event: TraceEvent) -> int:
        """Store an event for the next chunk; return the number of bytes added to ``deltas``."""
        if event.printed:
            self.printed.append(event.printed)
        if event.delta is None:
            return 0
        self.deltas.append(event.delta)
        self.num_pending += len(event.delta)
        return len(event.delta)

    def drop(self) -> None:
        """Drop the pending values; each is sent again when it arrives whole, or with the last chunk."""
        self.deltas[:] = [None]
        self.num_pending = 0

    def take_unread(self) -> list[bytes | None]:
        unread, self.deltas, self.num_pending = self.deltas, [], 0
        return unread

    def read(self, unread: Sequence[bytes | None], max_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the new data as JSON values: whole values, and items by which lists grew."""
        for data in unread:
            if data is None:
                self.reader.skip()
            else:
                self.reader.read(data)
        whole, grown = self.reader.take_changes()
        budget = SaveBudget(max_bytes)
        return self._plain(whole, budget), self._plain(grown, budget)

    def _plain(self, values: Mapping[str, Any], budget: SaveBudget) -> dict[str, Any]:
        """Return values as JSON types, without those that have none."""
        plain: dict[str, Any] = {}
        for name, value in values.items():
            try:
                plain.update(plain_saves({name: value}, _tensor_result, budget))
            except NotPlainError:  # the last chunk reports the error
                self.reader.forget(name)
        return plain

    def set_saves(self, saves: Mapping[str, Any], max_bytes: int) -> None:
        self.saves = plain_saves(saves, _tensor_result, SaveBudget(max_bytes))

    def take_printed(self) -> str:
        printed = "".join(self.printed)
        self.printed.clear()
        return printed


def _tensor_result(value: torch.Tensor) -> TensorResult:
    """Return a tensor as an answer has it; raise ValueError for a dtype that answers lack."""
    if value.dtype in _AS_INT64:
        value = value.to(torch.int64)
    name = _NAMES.get(value.dtype)
    if name is None or value.is_meta:
        where = " without numbers" if value.is_meta else ""
        raise ValueError(
            f"it holds a tensor of {str(value.dtype).removeprefix('torch.')}{where}; `.float()` makes one "
            "that can be"
        )
    return TensorResult(name, tuple(value.shape), tensor_to_bytes(value))
