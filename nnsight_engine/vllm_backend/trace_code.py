"""Encoding of a ``trace`` operation's code, compiled here only to find errors; none of it is executed."""

from __future__ import annotations

import dataclasses
import hashlib
from types import CellType
from typing import Any, Final

import torch

import nnsight_engine
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.operations import MODEL_NAME, TRACER_NAME, Trace
from api_schemas.tensors import TensorObject
from nnsight_engine.core.saves import save
from nnsight_engine.core.tensors import tensor_from_bytes
from nnsight_engine.remote_backend.values.received_blocks import SAVED
from nnsight_engine.serialization import EncodeError, SentBlock, encode_trace
from nnsight_engine.tracing.blocks import block_of_text
from nnsight_engine.tracing.tracer import Info

_ROOT: Final = ("envoy", "model")
_GLOBALS: Final = {
    "__name__": "__trace__",
    "nnsight_engine": nnsight_engine,
    "save": save,
    "torch": torch,
}
"""The globals of the code; names that it does not use are not sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class _WorkerReference:
    name: tuple[str, ...]


def filename_of(trace: Trace) -> str:
    """Return the file name in tracebacks; it differs for different code, as sources are cached by it."""
    return f"<trace {hashlib.sha256((trace.code or '').encode()).hexdigest()[:16]}>"


def encoded_code(trace: Trace, param: str) -> bytes:
    """Return a trace as a message for the worker; raise ApiError if its code cannot run as a block."""
    if trace.code is None:
        return trace.data
    names = frozenset({MODEL_NAME, TRACER_NAME, *trace.variables})
    try:
        block = block_of_text(trace.code, filename_of(trace), names)
    except SyntaxError as error:
        raise _refusal(trace.code, error, param) from error
    cells = {name: CellType(_value(value)) for name, value in trace.variables.items()}
    cells |= {
        MODEL_NAME: CellType(_WorkerReference(_ROOT)),
        TRACER_NAME: CellType(_WorkerReference(("tracer",))),
    }
    sent = SentBlock(Info(block, cells, None, dict(_GLOBALS)), cells)
    try:
        return encode_trace([sent], {SAVED: []}, reference=_reference)
    except EncodeError as error:
        raise ApiError(ErrorCode.INVALID_VALUE, f"The trace cannot be sent: {error}.", param) from error


def _reference(value: Any) -> tuple[str, ...] | None:
    return value.name if type(value) is _WorkerReference else None


def _value(value: Any) -> Any:
    if isinstance(value, TensorObject):
        return tensor_from_bytes(value.dtype, value.shape, value.raw)
    return value


def _refusal(code: str, error: SyntaxError, param: str) -> ApiError:
    lines = code.splitlines() or [""]
    number = min(max(error.lineno or 1, 1), len(lines))
    return ApiError(
        ErrorCode.INVALID_VALUE,
        f"The trace's `code` cannot be compiled: {error.msg}, in line {number}: "
        f"`{lines[number - 1].strip()[:200]}`.",
        f"{param}.code",
    )
