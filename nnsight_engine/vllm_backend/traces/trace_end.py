"""The end of a trace in the worker: closes its blocks and encodes the saved values as a message."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.remote_backend.values.received_blocks import outcome_of, outcome_pieces
from nnsight_engine.serialization import encode, encode_error
from nnsight_engine.serialization.limits import MessageLimits
from nnsight_engine.serialization.message.table import Piece
from nnsight_engine.vllm_backend.traces.errors import TraceBytesError
from nnsight_engine.vllm_backend.traces.results import Result, checked, client_reference
from nnsight_engine.vllm_backend.traces.scans import first_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nnsight_engine.interleaving.threads import Threads
    from nnsight_engine.vllm_backend.traces.caches import RequestCache
    from nnsight_engine.vllm_backend.traces.context import TraceContext
    from nnsight_engine.vllm_backend.traces.entry import TraceEntry
    from nnsight_engine.vllm_backend.traces.request import TracedRequest

_MAX_BYTES: Final = MessageLimits().max_bytes
_BESIDE_BYTES: Final = 2**24
"""Allowance for the parts of a message that are not tensors, such as errors."""
_BYTES_WRITTEN_A_SECOND: Final = 100e6
"""Minimum rate at which results are encoded; it extends the time that a block's thread may take."""


@dataclasses.dataclass(slots=True)
class TraceMember:
    request: TracedRequest | None
    context: TraceContext | None
    entry: TraceEntry
    choice: int
    error: BaseException | None = None
    shapes: RequestCache | None = None
    is_known: bool = False


class TraceEnd:
    """Closes blocks and encodes their results, on ``threads``: that runs code of the blocks' objects."""

    def __init__(self, threads: Threads, max_bytes: int, max_message_bytes: int = _MAX_BYTES) -> None:
        self._threads = threads
        self._max_bytes = max_bytes
        self._max_message_bytes = max_message_bytes

    def failed(self, members: Sequence[TraceMember], error: BaseException) -> bytes:
        """Return the message of a trace one of whose requests did not reach the trace's sandbox process."""
        blocks = [
            outcome_of(one.entry.index, {}, self.error_data(one.error or error), choice=one.choice)
            for one in members
        ]
        return encode({"blocks": blocks, "before": None})

    def closed(self, member: TraceMember, results: Mapping[str, Any]) -> dict[str, Any]:
        error = member.error
        if member.request is not None:
            name = f"{member.entry.index}/{member.choice}"
            reference = name if member.entry.plain else str(member.entry.index)
            member.request.close(Result(results.get(name), reference))
            error = member.request.error
        saves: dict[str, Any] = {}
        flows: dict[str, Any] = {}
        if member.context is not None and member.request is not None and not is_too_much(error):
            saves = member.context.saves(member.entry.index)
            flows = member.context.flows(member.entry.index)
        if member.entry.plain:
            saves, error = ({}, error) if error is not None else checked(saves, self._max_bytes)
        data = None if error is None else self.error_data(error)
        warnings = [] if member.request is None or data is not None else member.request.warnings()
        outcome = outcome_of(
            member.entry.index, saves, data, choice=member.choice, flows=flows, warnings=warnings
        )
        return outcome | {"shapes": {} if member.shapes is None else first_values(member.shapes)}

    def encoded(self, message: dict[str, Any], num_bytes: int, *, compress: bool) -> list[Piece]:
        """Return a trace's results as pieces, encoded on a block thread: it runs code of the saved objects.

        If encoding fails, the message carries the error in place of the values.
        """
        max_bytes = min(self._max_bytes * len(message["blocks"]), self._max_message_bytes) + _BESIDE_BYTES
        limits = MessageLimits(max_bytes=max_bytes)
        stack = self._threads.take()
        stack.left_s += num_bytes / _BYTES_WRITTEN_A_SECOND
        pieces: list[Piece] | None
        pieces, error = stack.start(
            lambda: outcome_pieces(message, client_reference, compress=compress, limits=limits)
        ).empty()
        if pieces is not None:
            return pieces
        for block in message["blocks"]:
            block["saves"] = block["flows"] = {}
            block["error"] = block["error"] or self.error_data(error)
        return [encode({**message, "before": None})]

    def error_data(self, error: BaseException) -> dict[str, Any]:
        """Return an error as data, encoded on a block thread: it runs code of the error's class."""
        try:
            data: dict[str, Any] = self._threads.run(lambda: encode_error(error))
        except BaseException as failed:  # noqa: BLE001 - whatever that code does
            name, why = type(error).__name__, type(failed).__name__
            return encode_error(RuntimeError(f"the block raised {name}, which cannot be sent: {why}"))
        return data


def is_too_much(error: BaseException | None) -> bool:
    """Return whether a request has failed because it held too much memory."""
    return isinstance(error, TraceBytesError)
