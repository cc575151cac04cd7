"""Execution of a client's blocks and encoding of the outcome: the common part of traces and sessions.

Runs one trace at a time, in a dedicated process: decoding a trace already runs the client's code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.saves import SAVES
from nnsight_engine.remote_backend.codecs import decode_blocks
from nnsight_engine.remote_backend.values.received_blocks import (
    SAVED,
    ReceivedInvoke,
    failure_of,
    invokes_of,
    outcome_of,
    outcome_pieces,
)
from nnsight_engine.serialization import DecodeError, MessageLimits, ReceivedTrace, encode_error
from nnsight_engine.tracing.frames import clean
from nnsight_engine.tracing.tracer import Session

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
    from nnsight_engine.serialization.graph import Resolve
    from nnsight_engine.tracing.tracer import Tracer


class TraceCancelledError(BaseException):
    """The trace is to end. Not an ``Exception``, so that ``except Exception`` does not catch it."""


class ReadTrace:
    """A decoded trace whose parts were checked; ``saved`` are containers saved before the blocks ran."""

    def __init__(self, head: TraceHead, received: ReceivedTrace) -> None:
        """Divide the blocks into invokes and edits; DecodeError if they do not fit the header."""
        self.head = head
        self.shared: Mapping[str, Any] = received.shared
        num_own = len(received.blocks) - head.num_edits
        if num_own < 1 or (head.kind == "session" and num_own != 1):
            raise DecodeError(
                f"the trace is invalid: it has {len(received.blocks)} blocks, and its header names "
                f"{head.num_edits} of them as edits of a {head.kind}"
            )
        self.invokes: Sequence[ReceivedInvoke] = invokes_of(received.blocks[:num_own], head.groups[:num_own])
        self.edits = received.blocks[num_own:]
        self.saved: Collection[Any] = self.shared.get(SAVED) or []
        if head.kind == "trace":
            for invoke, (args, kwargs) in zip(self.invokes, _inputs(self.shared, num_own), strict=True):
                invoke.args, invoke.kwargs = args, kwargs


def _inputs(shared: Mapping[str, Any], num_invokes: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the positional and keyword arguments of each invoke; DecodeError if they are malformed."""
    inputs = shared.get("inputs")
    if (
        not isinstance(inputs, list)
        or len(inputs) != num_invokes
        or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in inputs)
        or not all(isinstance(args, tuple) and isinstance(kwargs, dict) for args, kwargs in inputs)
    ):
        raise DecodeError(f"the trace is invalid: it needs inputs for its {num_invokes} invokes")
    return inputs


class BlockRunner(ABC):
    """Runs traces, one after the other; subclasses define the model and the tracer of the blocks.

    ``failure`` is the error message of the last trace, empty if it had no error; ``needs_replacement``:
    whether no further trace may run here.
    """

    def __init__(
        self, *, max_result_bytes: int = MessageLimits().max_bytes, compresses: bool = False
    ) -> None:
        """Set the limit of an encoded outcome, and whether it is compressed for clients that accept it."""
        self.failure = ""
        self.needs_replacement = False
        self._limits = MessageLimits(max_bytes=max_result_bytes)
        self._compresses = compresses

    @abstractmethod
    def _prepared(self, request: TraceRequest) -> AbstractContextManager[tuple[Tracer, Resolve]]:
        """Return a context in which a request's blocks can run, with their tracer and their references."""

    @abstractmethod
    def _execute(self, trace: ReadTrace, tracer: Tracer) -> None: ...

    def _warnings(self, tracer: Tracer) -> Sequence[str]:  # noqa: ARG002 - for subclasses that have some
        return ()

    @abstractmethod
    def _reference(self, value: Any) -> tuple[str, ...] | None:
        """Return a reference to a value that the client has itself; None for other values."""

    @abstractmethod
    def _clean_up(self) -> None:
        """Clean up after the trace, however it ended; the client waits for this."""

    def settle(self) -> bool:
        """Undo the changes of the last trace; return False if no further trace may run here.

        The caller sends the answer first, so that only the next trace waits.
        """
        return not self.needs_replacement

    def run(self, request: TraceRequest) -> bytes:
        """Run a trace's blocks and return the encoded outcome, see ``outcomes``; raises DecodeError."""
        self.failure = ""
        SAVES.enter()
        try:
            with self._prepared(request) as (tracer, resolve):
                return self._run_blocks(request, tracer, resolve)
        finally:
            SAVES.exit()
            self._clean_up()

    def recover(self) -> None:
        """Reset the runner after a trace that was interrupted at an arbitrary point."""
        while SAVES.depth:
            SAVES.exit()
        self._clean_up()

    def _run_blocks(self, request: TraceRequest, tracer: Tracer, resolve: Resolve) -> bytes:
        """Decode and run the blocks; return the encoded outcome, with an error at the first block."""
        head = request.head
        # The server has checked the codec and its tenant, see ``app.auth.principal``.
        received = decode_blocks(head.codec, request.blocks, resolve=resolve, trusted=True)
        trace = ReadTrace(head, received)
        SAVES.marked.update({id(value): value for value in (*trace.saved, *received.saved)})
        error = self._outcome(trace, tracer)
        error_data = None if error is None else encode_error(error)
        del error  # its traceback refers to the block's frames and their values
        blocks = [
            outcome_of(
                index,
                invoke.saves(SAVES.marked),
                error_data if index == 0 else None,
                flows=invoke.flows(SAVES.marked, head.wanted),
                warnings=self._warnings(tracer) if index == 0 else (),
            )
            for index, invoke in enumerate(trace.invokes)
        ]
        self.failure = failure_of(blocks)
        pieces = outcome_pieces(
            {"blocks": blocks, "before": list(trace.saved)},
            self._reference,
            compress=self._compresses and "zstd" in head.accepts,
            limits=self._limits,
        )
        return b"".join(pieces)

    def _outcome(self, trace: ReadTrace, tracer: Tracer) -> BaseException | None:
        """Run the decoded blocks; return their error, without our frames, or None."""
        try:
            self._execute(trace, tracer)
        except TraceCancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is sent to the client
            return clean(error, debug=False)
        return None


def run_session(trace: ReadTrace, session: Session) -> None:
    """Run a session's block as plain code; its traces run on the backend of its model."""
    (block,) = trace.invokes
    session.compile_on(block.info)()
