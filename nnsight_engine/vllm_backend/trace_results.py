"""The results and deltas of a block of the operation ``trace``, decoded and converted to JSON types.

Hazard: the bytes decoded here may come from a sandbox process that runs untrusted code. They are decoded as
data only, uncompressed, with limits on their size, and converted to fixed types. Bytes that cannot be decoded
raise an exception of ``saved_deltas.MALFORMED``, which fails only the request that they belong to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch

from nnsight_engine.core.tensor_bytes import DTYPES, tensor_to_bytes
from nnsight_engine.plans.collect.results import TensorResult
from nnsight_engine.remote_backend.saved_deltas import DeltaReader, checked_list, values_by_name
from nnsight_engine.remote_backend.values.outcomes import warnings_of
from nnsight_engine.serialization import DecodeError, MessageLimits, Policy, decode
from nnsight_engine.tracing.text_blocks import NUM_LINES_BEFORE

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


def delta_reader() -> DeltaReader:
    """Return a reader for the deltas of one choice."""
    return DeltaReader(_PLAIN, _DELTA_LIMITS)


class _Entry(msgspec.Struct):
    """A line of a block's traceback."""

    file: str
    line: int
    source: str


class BlockError(msgspec.Struct):
    """The parts of an error, as ``encode_error`` encodes it, that are reported.

    They are converted to fixed types, because formatting a deeply nested list may take forever.
    """

    name: str
    message: str
    notes: list[str] = []
    entries: list[_Entry] = []

    @classmethod
    def of(cls, error: Any) -> BlockError:
        """Return a decoded error.

        Raises:
            DecodeError: It is no error.
        """
        if type(error) is not dict:
            raise DecodeError("its error has no parts")
        parts = {name: error[name] for name in ("name", "message") if name in error}
        for name, most in (("notes", _MAX_NOTES), ("entries", _MAX_ENTRIES)):
            if type(error.get(name)) is list:
                parts[name] = error[name][-most:]
        try:
            return msgspec.convert(parts, cls)
        except msgspec.ValidationError as invalid:
            raise DecodeError(f"its error has parts of other types: {invalid}") from invalid

    def text(self) -> str:
        """Return the error's message."""
        return self.message[:_MAX_TEXT]

    def description(self, filename: str) -> str:
        """Return the line that failed, one in ``filename`` if possible, and the error."""
        notes = "".join(f" {note[:_MAX_TEXT]}" for note in self.notes)
        return f"{self._line(filename)}: {self.name[:_MAX_TEXT]}: {self.text()}{notes}"

    def _line(self, filename: str) -> str:
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
    """The result of the block of one choice.

    Attributes:
        choice: The number of the choice.
        saves: The saved values by name.
        warnings: Warnings for the client.
        error: The block's error; None if it has not failed.
    """

    choice: int
    saves: dict[str, Any]
    warnings: tuple[str, ...]
    error: BlockError | None


def read_results(data: bytes | memoryview, results: Mapping[str, Any], num_choices: int) -> list[BlockResult]:
    """Decode the results of a trace.

    Args:
        data: The worker's message.
        results: The requests' results by name, for references to them.
        num_choices: The number of choices.

    Raises:
        DecodeError: The message is malformed; so do other exceptions of ``MALFORMED``.
    """
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
    choice, error = block["choice"], block["error"]
    if type(choice) is not int or not 0 <= choice < num_choices:
        raise DecodeError("a block has no choice")
    if error is not None:
        return BlockResult(choice, {}, (), BlockError.of(error))
    return BlockResult(choice, values_by_name(block["saves"]), warnings_of(block), None)


def tensor_result(value: torch.Tensor) -> TensorResult:
    """Return a tensor as part of an answer; raises ValueError if its dtype has no representation there."""
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
