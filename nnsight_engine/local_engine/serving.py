"""The main loop of a trace process: a thread listens to the server, the main thread runs one trace at a time.

The process ends when its server has ended, for whatever reason.
"""

from __future__ import annotations

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import msgspec

from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.process import end_before_server
from nnsight_engine.local_engine.block_runner import Cancelling, TraceCancelledError
from nnsight_engine.local_engine.process_state import ProcessHooks
from nnsight_engine.local_engine.trace_process import (
    ANSWER,
    CANCEL,
    FAILED,
    KIND,
    READY,
    RUN,
    WORN,
    ProcessChannel,
    ProcessOptions,
)
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.remote_backend.unread_output import Prints
from nnsight_engine.serialization import DecodeError

if TYPE_CHECKING:
    from nnsight_engine.local_engine.block_runner import BlockRunner

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1


class ServerRequests:
    def __init__(self, send: Callable[[dict[str, Any], bytes], None]) -> None:
        self._send = send
        self._answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def send(self, message: dict[str, Any], data: bytes) -> None:
        while not self._answers.empty():  # left from a trace that was cancelled
            self._answers.get()
        self._send(message, data)

    def answer(self) -> Frame:
        return self._answers.get()

    def take(self, frame: Frame) -> None:
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
    serving = _Serving(ProcessChannel(sock))
    threading.Thread(target=serving.listen, name="listener", daemon=True).start()
    serving.run(lambda: load(options, serving.server_requests))


class _Serving:
    def __init__(self, link: ProcessChannel) -> None:
        self._link = link
        self._cancelling = Cancelling()
        self._traces: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.server_requests = ServerRequests(self._send)

    def listen(self) -> None:
        """Handle the server's messages, on its own thread; kill the process group when it ends."""
        try:
            frames = self._link.frames()
            for frame in frames:
                message = frame.json()
                if RUN in message:
                    self._traces.put((message[RUN], next(frames).data))
                elif CANCEL in message:
                    self._cancelling.cancel(message[CANCEL])
                elif ANSWER in message:
                    self.server_requests.take(Frame(FrameKind(message[KIND]), next(frames).data))
        finally:
            os.killpg(os.getpgid(0), signal.SIGKILL)  # including processes that blocks have started

    def run(self, load: Callable[[], BlockRunner]) -> None:
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
        hooks = ProcessHooks()
        self._send({READY: True})
        while True:
            number, data = self._traces.get()
            self._send_event("RUNNING")
            stdout.begin()
            answer = self._answer(runner, number, data)
            del data
            stdout.end()
            if answer.kind is FrameKind.RESULT and runner.failure:
                self._send_event("ERROR", message=runner.failure)
            if runner.needs_replacement:
                self._log(
                    "[the trace has changed the model's weights, which are reloaded for the next traces]"
                )
            self._link.send(answer)
            del answer
            # From here on only the next trace waits.
            is_fit = runner.settle() and hooks.restore()
            self._send({READY: True} if is_fit else {WORN: True})
            if not is_fit:
                return

    def _answer(self, runner: BlockRunner, number: int, data: Any) -> Frame:
        try:
            self._cancelling.begin(number)
            try:
                return Frame(FrameKind.RESULT, runner.run(TraceRequest.from_bytes(data)))
            finally:
                self._cancelling.end()
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
            self._link.send(json_frame(FrameKind.EVENT, message), data)


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
    def __init__(self, real: TextIO, emit: Callable[[str], None]) -> None:
        self._real = real
        self._emit = emit
        self._prints: Prints | None = None

    def begin(self) -> None:
        self._prints = Prints()

    def end(self) -> None:
        prints, self._prints = self._prints, None
        if prints is not None:
            self._emit_text(prints.take(everything=True))

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._prints is None:
            return self._real.write(text)
        self._prints.write(text)
        if "\n" in text:
            self._emit_text(self._prints.take())
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
