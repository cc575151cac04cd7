"""Execution of a client's blocks and encoding of the outcome: the common part of traces and sessions.

Runs one trace at a time, in a dedicated process: decoding a trace already runs the client's code.

Cancellation of a trace from another thread: an exception at its current line, even if that line blocks.

It uses a signal, because nothing else interrupts a thread that sleeps or reads. The exception is raised in
the main thread, where traces run, and only between ``begin`` and ``end``.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.core.saves import SAVES
from nnsight_engine.envoys.tracers.session import Session
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

if TYPE_CHECKING:
    from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
    from nnsight_engine.serialization.decoding.decoder import Resolve
    from nnsight_engine.tracing.tracer import Tracer


class TraceCancelledError(BaseException):
    """The trace is to end. Not an ``Exception``, so that ``except Exception`` does not catch it."""


_SIGNAL: Final = signal.SIGUSR1


class Cancelling:
    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._number: int | None = None
        self._num_deferred = 0
        self._is_due = False
        signal.signal(_SIGNAL, self._on_signal)

    def begin(self, number: int) -> None:
        self._is_due = False
        self._number = number

    def end(self) -> None:
        self._number = None

    def cancel(self, number: int) -> None:
        """Cancel a trace, from any thread, if it is the one that runs."""
        if self._number == number and self._main is not None:
            signal.pthread_kill(self._main, _SIGNAL)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer cancellation within the context; raise TraceCancelledError at its end instead."""
        if threading.get_ident() != self._main:
            yield  # a thread that a block has started is not cancelled
            return
        self._num_deferred += 1
        try:
            yield
        finally:
            self._num_deferred -= 1
        if self._is_due:
            self._raise()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            return
        if self._num_deferred:
            self._is_due = True
        else:
            self._raise()

    def _raise(self) -> None:
        self._is_due = False
        raise TraceCancelledError("the trace was cancelled")


class ReadTrace:
    """A decoded trace whose parts were checked; ``saved`` are containers saved before the blocks ran."""

    def __init__(self, head: TraceHead, received: ReceivedTrace) -> None:
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
    given = shared.get("inputs")
    if (
        not isinstance(given, list)
        or len(given) != num_invokes
        or not all(isinstance(one, tuple) and len(one) == 2 for one in given)
        or not all(isinstance(args, tuple) and isinstance(kwargs, dict) for args, kwargs in given)
    ):
        raise DecodeError(f"the trace is invalid: it needs inputs for its {num_invokes} invokes")
    return given


class BlockRunner(ABC):
    """Runs traces, one after the other; subclasses define ``model`` and ``tracer`` of the blocks."""

    def __init__(
        self, *, max_result_bytes: int = MessageLimits().max_bytes, compresses: bool = False
    ) -> None:
        self.failure = ""
        """The error message of the last trace; empty if it had no error."""
        self._limits = MessageLimits(max_bytes=max_result_bytes)
        self._compresses = compresses

    @property
    def needs_replacement(self) -> bool:
        """Whether no further trace may run here."""
        return False

    @abstractmethod
    def _tracer(self, head: TraceHead) -> Tracer: ...

    @abstractmethod
    def _resolver(self, tracer: Tracer) -> Resolve: ...

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

        The caller sends the answer first, so that only the next trace waits. ``run`` calls it if nobody did.
        """
        return not self.needs_replacement

    def run(self, request: TraceRequest) -> bytes:
        """Run a trace's blocks and return the encoded outcome, see ``outcomes``; raises DecodeError."""
        SAVES.enter()
        try:
            return self._run(request)
        finally:
            SAVES.exit()
            self._clean_up()

    def recover(self) -> None:
        """Reset the runner after a trace that was interrupted at an arbitrary point."""
        while SAVES.depth:
            SAVES.exit()
        self._clean_up()

    def _run(self, request: TraceRequest) -> bytes:
        self.failure = ""
        tracer = self._tracer(request.head)
        resolve = self._resolver(tracer)
        with self._prepared(request, resolve):
            return self._run_blocks(request, tracer, resolve)

    def _prepared(
        self,
        request: TraceRequest,  # noqa: ARG002 - for subclasses that prepare something
        resolve: Resolve,  # noqa: ARG002 - likewise
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def _run_blocks(self, request: TraceRequest, tracer: Tracer, resolve: Resolve) -> bytes:
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
