"""The main loop of a trace process: a thread listens to the server, the main thread runs one trace at a time.

The process ends when its server has ended, for whatever reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import msgspec

from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.process import end_before_server
from nnsight_engine.local_engine.block_runner import TraceCancelledError
from nnsight_engine.local_engine.process_state import ProcessState, renew_globals
from nnsight_engine.local_engine.trace_process import (
    ANSWER,
    CANCEL,
    FAILED,
    KIND,
    MAX_FRAME_BYTES,
    READY,
    RUN,
    WORN,
    ProcessOptions,
)
from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader, head_of, json_frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.remote_backend.unread_output import Prints
from nnsight_engine.serialization import DecodeError

if TYPE_CHECKING:
    from nnsight_engine.local_engine.block_runner import BlockRunner

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_CANCEL_SIGNAL: Final = signal.SIGUSR1


class _ServerChannel:
    """The process's end of the socket, which is in blocking mode."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, frame: Frame, data: bytes = b"") -> None:
        """Send a frame, and ``data``, if any, as the next one; atomic, callable from any thread."""
        with self._lock:
            self._socket.sendall(frame.head())
            self._socket.sendall(frame.data)
            if data:
                self._socket.sendall(head_of(FrameKind.RESULT, len(data)))
                self._socket.sendall(data)

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that the server sends until it closes the connection."""
        reader = FrameReader(MAX_FRAME_BYTES)
        with contextlib.suppress(ConnectionError):
            while num_bytes := self._socket.recv_into(reader.free_space()):
                frame = reader.advance(num_bytes)
                if frame is not None:
                    yield frame


class _Cancelling:
    """Cancels a trace from another thread: an exception at its current line, even if that line blocks.

    It uses a signal, because nothing else interrupts a thread that sleeps or reads. The exception is raised
    in the main thread, where traces run, and only between ``begin`` and ``end``.
    """

    def __init__(self) -> None:
        """Install the signal's handler; ``_number`` is the trace that runs, None between traces."""
        self._main = threading.main_thread().ident
        self._number: int | None = None
        self._num_deferred = 0
        self._is_due = False
        signal.signal(_CANCEL_SIGNAL, self._on_signal)

    def begin_trace(self, number: int) -> None:
        self._is_due = False
        self._number = number

    def end_trace(self) -> None:
        self._number = None

    def cancel(self, number: int) -> None:
        """Cancel a trace, from any thread, if it is the one that runs."""
        if self._number == number and self._main is not None:
            signal.pthread_kill(self._main, _CANCEL_SIGNAL)

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
        """Cancel the trace that runs, or note that it is to be, on the main thread."""
        if self._number is None:
            return
        if self._num_deferred:
            self._is_due = True
        else:
            self._raise()

    def _raise(self) -> None:
        self._is_due = False
        raise TraceCancelledError("the trace was cancelled")


class ServerRequests:
    """Requests of blocks to the server, one at a time; the listener thread puts the answers."""

    def __init__(self, send: Callable[[dict[str, Any], bytes], None]) -> None:
        self._send = send
        self._answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def send(self, message: dict[str, Any], data: bytes) -> None:
        """Send a request, whose frames ``answer`` returns."""
        while not self._answers.empty():  # left from a trace that was cancelled
            self._answers.get()
        self._send(message, data)

    def answer(self) -> Frame:
        return self._answers.get()

    def put_answer(self, frame: Frame) -> None:
        self._answers.put(frame)


def serve(arguments: list[str], load: Callable[[ProcessOptions, ServerRequests], BlockRunner]) -> None:
    """Run traces until the server has ended; arguments are the socket's descriptor and options as JSON."""
    _end_with(os.getppid())
    sock = socket.socket(fileno=int(arguments[0]))
    sock.settimeout(None)
    options = msgspec.json.decode(arguments[1], type=ProcessOptions)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    # The configuration of the user who runs the server must not affect clients.
    CONFIG.APP.DEBUG = CONFIG.APP.REMOTE_LOGGING = False
    CONFIG.APP.CROSS_INVOKER = CONFIG.APP.PYMOUNT = True
    serving = _Serving(_ServerChannel(sock))
    threading.Thread(target=serving.listen, name="listener", daemon=True).start()
    serving.run(lambda: load(options, serving.server_requests))


class _Serving:
    """Connects the listener's thread with the main thread, which runs the traces."""

    def __init__(self, channel: _ServerChannel) -> None:
        """Create the queues of traces and of answers, which ``listen`` fills."""
        self._channel = channel
        self._cancelling = _Cancelling()
        self._traces: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.server_requests = ServerRequests(self._send)

    def listen(self) -> None:
        """Handle the server's messages, on its own thread; kill the process group when it ends."""
        try:
            frames = self._channel.frames()
            for frame in frames:
                message = frame.json()
                if RUN in message:
                    self._traces.put((message[RUN], next(frames).data))
                elif CANCEL in message:
                    self._cancelling.cancel(message[CANCEL])
                elif ANSWER in message:
                    self.server_requests.put_answer(Frame(FrameKind(message[KIND]), next(frames).data))
        finally:
            os.killpg(os.getpgid(0), signal.SIGKILL)  # including processes that blocks have started

    def run(self, load: Callable[[], BlockRunner]) -> None:
        """Load the runner, then run trace after trace; return if no further one may run here."""
        try:
            runner = load()
        except Exception as error:
            logger.exception("the trace runner could not be loaded")
            self._send({FAILED: f"{type(error).__name__}: {error}"})
            return
        gc.collect()
        gc.freeze()  # these objects are permanent, and need not be scanned after each trace
        sys.breakpointhook = _refuse_breakpoint
        sys.stdout = stdout = _TraceStdout(sys.stdout, self._log)
        warnings.showwarning = _print_warning
        state = ProcessState()
        renew_globals()
        self._send({READY: True})
        while True:
            number, data = self._traces.get()
            self._send_event("RUNNING")
            stdout.begin_trace()
            answer = self._answer(runner, number, data)
            del data
            stdout.end_trace()
            if answer.kind is FrameKind.RESULT and runner.failure:
                self._send_event("ERROR", message=runner.failure)
            if runner.needs_replacement:
                self._log(
                    "[the trace has changed the model's weights, which are reloaded for the next traces]"
                )
            self._channel.send(answer)
            del answer
            # From here on only the next trace waits.
            is_fit = state.restore() and runner.settle()
            gc.collect()  # errors and blocks form reference cycles, which hold activations
            # Finalizers that ran just now may have set anything again.
            is_fit = is_fit and state.restore()
            self._send({READY: True} if is_fit else {WORN: True})
            if not is_fit:
                return

    def _answer(self, runner: BlockRunner, number: int, data: Any) -> Frame:
        """Run a trace, which may be cancelled; return the frame with its result or its error."""
        try:
            self._cancelling.begin_trace(number)
            try:
                return Frame(FrameKind.RESULT, runner.run(TraceRequest.from_bytes(data)))
            finally:
                self._cancelling.end_trace()
        except DecodeError as error:
            return _refusal("invalid_trace", str(error))
        except TraceCancelledError:
            runner.recover()
            return _refusal("cancelled", "the trace was cancelled")
        except Exception:
            logger.exception("a trace failed in its process")
            return _refusal("internal_error", "the trace failed")

    def _log(self, text: str) -> None:
        self._send_event("LOG", message=text)

    def _send_event(self, status: str, **more: str) -> None:
        self._send({"status": status, "time": time.time(), **more})

    def _send(self, message: dict[str, Any], data: bytes = b"") -> None:
        with self._cancelling.deferred():
            self._channel.send(json_frame(FrameKind.EVENT, message), data)


def _refuse_breakpoint(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "breakpoint() needs a terminal, which a trace on a server does not have: run it with remote=False"
    )


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning, so that it goes to the client that sent the block, like all output."""
    print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file)


class _TraceStdout(io.TextIOBase):
    """Standard output of blocks, which ``emit`` receives by lines; without a trace, the process's own."""

    def __init__(self, real: TextIO, emit: Callable[[str], None]) -> None:
        self._real = real
        self._emit = emit
        self._prints: Prints | None = None

    def begin_trace(self) -> None:
        self._prints = Prints()

    def end_trace(self) -> None:
        """Emit the rest of the trace's output; from now on, the process's own is used."""
        prints, self._prints = self._prints, None
        if prints is not None:
            self._emit_text(prints.take_lines(everything=True))

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Emit the lines that are complete; without a trace, write to the process's own output."""
        if self._prints is None:
            return self._real.write(text)
        self._prints.write(text)
        if "\n" in text:
            self._emit_text(self._prints.take_lines())
        return len(text)

    def _emit_text(self, text: str) -> None:
        if text:
            self._emit(text.removesuffix("\n"))


def _refusal(code: str, message: str) -> Frame:
    return json_frame(FrameKind.ERROR, {"error": {"code": code, "message": message}})


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in case the listener thread cannot."""
    os.nice(10)  # lower priority than an engine that serves other clients
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the parent has ended in the meantime
    end_before_server()
