"""The worker's connection to one sandbox process: asynchronous requests, and the process's time budget.

Nothing here blocks on an answer, so several processes compute concurrently, and the model need not wait for a
slow one (``wait_budget``). The budget is measured in the process's CPU time plus the worker's time for its
messages and calls, because by wall-clock time a process is slow wherever the machine is busy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization import encode_error
from nnsight_engine.serialization.message import Piece
from nnsight_engine.serialization.wire import encode_pieces
from nnsight_engine.vllm_backend.traces.block_adapters import NO_ADAPTER
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.messages import CallResult, Tensors, ValueSlot, packed
from nnsight_engine.vllm_backend.traces.row_payloads import RowsPlaceholder, RowStore
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    CallRequest,
    Collect,
    Collected,
    ContinueReply,
    ToSandbox,
    read_by_worker,
)

if TYPE_CHECKING:
    from nnsight_engine.sandbox.forkserver import Sandbox
    from nnsight_engine.vllm_backend.traces.sandboxed.module_calls import CallableModules, ModuleCall
    from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import ProcessSource
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

logger = logging.getLogger(__name__)

_GRACE_S: Final = 0.25
"""Extra time in which a sandbox process can interrupt a block itself, so that the author sees the line."""
_READ_S: Final = 0.02
"""Time for a sandbox process to decode one request's block, beside the time of all blocks in a step."""
_WALL: Final = 30.0
"""Limit for the wall-clock time of an answer, as a multiple of its CPU budget.

The machine may be busy, or the process asleep: many sandbox processes on a small machine wait for each other,
and they run at the lowest priority.
"""

_START_S: Final = 60.0
"""Time for which a trace waits for a process."""

_KNOWN_PARTS: Final = 4
"""Number of parts of a module call after which its total time is estimated."""


class SandboxConnection:
    """The connection to one process, which may compute ``budget_s`` in a step and ``trace_s`` in all.

    If no process is ready, the first request is sent once there is one; until then it counts as not answered.

    Attributes:
        error: Why the process was ended prematurely; None if it was not.
        waited_s: Seconds that the worker has waited for it, since ``take_spent`` was last called.
        is_held: Whether an answer that arrives is stored until ``take_held`` is called.
    """

    def __init__(
        self,
        source: ProcessSource,
        dispatcher: TraceDispatcher,
        served: CallableModules,
        max_bytes: int,
        budget_s: float,
        trace_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """Take a process if one is ready; ``on_end`` is called if it is ended prematurely."""
        self.sandbox: Sandbox | None = source.take_process()
        self.error: Exception | None = None
        self.waited_s = 0.0
        self.is_held = False
        self.adapter = NO_ADAPTER
        self._source = source
        self._unsent: list[bytes | memoryview] = []
        self._dispatcher = dispatcher
        self._served = served
        self._max_bytes = max_bytes
        self._budget_s = budget_s
        self._trace_s = trace_s
        self._on_end = on_end
        # The type of the answer that is due, the function that gets it, and the answer once it has come.
        self._answer: type[ContinueReply | Collected] | None = None
        self._then: Callable[[Any, memoryview], None] | None = None
        self._came: tuple[ContinueReply | Collected, memoryview] | None = None
        self._sent_at = time.monotonic()
        self._left_s = 0.0  # the budget of this step
        # The worker's seconds for this process's messages and calls, since ``refill``.
        self._worked_s = self._worked_before_call_s = 0.0
        self._call: ModuleCall | None = None
        self._cpu_s = self._reported_cpu_s = self._read_cpu_s()
        self.refill()

    @property
    def is_pending(self) -> bool:
        return self._answer is not None and self._came is None and self.error is None

    @property
    def is_unanswered(self) -> bool:
        """Whether an answer has yet to be processed, whether it has arrived or not."""
        return self._answer is not None and self.error is None

    def send_event(
        self, head: ToSandbox, then: Callable[[Any, memoryview], None], body: Sequence[Piece] = ()
    ) -> None:
        """Send a request; ``then`` gets the answer, and the bytes behind its header.

        The answer is ``Collected`` to ``Collect``, else ``ContinueReply``. Only one request may be unanswered
        at a time.
        """

        def send() -> None:
            self._sent_at = time.monotonic()
            self._send(packed(head, body))
            self._answer = Collected if isinstance(head, Collect) else ContinueReply
            self._then = then

        self._guarded(send)

    def _send(self, message: list[bytes | memoryview]) -> None:
        """Send a message to the process, or keep it until there is one."""
        if self.sandbox is None:
            self._unsent = message
        else:
            self.sandbox.side.send(message)

    @property
    def has_process(self) -> bool:
        return self.sandbox is not None

    def fileno(self) -> int:
        """Return a descriptor that can be read when ``pump`` has something to do."""
        return self._source.fileno() if self.sandbox is None else self.sandbox.side.fileno()

    def pump(self) -> None:
        """Read a message that has arrived, the answer or one call of a module; first get the process."""
        if not self.is_pending or self.is_calling:
            return
        if self.sandbox is None:
            self._guarded(self._acquire_process)
        else:
            self._guarded(self._read)

    def _acquire_process(self) -> None:
        """Take a process if one is ready, and send it the message that waits for it."""
        self.sandbox = self._source.take_process()
        if self.sandbox is not None:
            self._sent_at = time.monotonic()
            self._cpu_s = self._reported_cpu_s = self._read_cpu_s()
            message, self._unsent = self._unsent, []
            self._send(message)

    def _read(self) -> None:
        """Read one message: the answer, or a request to call a module before it; else end the process."""
        assert self.sandbox is not None  # noqa: S101 - it has got a request
        with self._charged():
            data = self.sandbox.side.take_answer(self._max_bytes)
            if data is None:
                return
            reply, content = read_by_worker(data)
        if isinstance(reply, CallRequest):
            if len(content) > self._served.call_bytes:  # the process checks it before it calls
                raise SandboxEndedError.broken("it called a module with more than a call may have")
            self._serve(lambda: self._begin_call(reply, content))
            return
        if self._answer is None or not isinstance(reply, self._answer):
            raise SandboxEndedError.broken("it answered something else than it was asked")
        if content and not (isinstance(reply, Collected) or reply.changes):
            raise SandboxEndedError.broken("it sent bytes that nobody asked for")
        self._came = (reply, content)
        if not self.is_held:
            self._process_answer()

    def take_held(self) -> None:
        self.is_held = False
        if self._came is not None:
            self._guarded(self._process_answer)

    def drop_answer(self) -> None:
        """Ignore the answer to the last request, whether it has arrived or not."""
        self._then = _nothing
        self.take_held()

    def _process_answer(self) -> None:
        """Pass the answer to the function that was given with its request."""
        assert self._came is not None  # noqa: S101 - an answer has come
        assert self._then is not None  # noqa: S101 - it was asked for
        (reply, content), then = self._came, self._then
        self._answer = self._then = self._came = None
        with self._charged():
            then(reply, content)

    @property
    def is_calling(self) -> bool:
        """Whether a module call is in progress, of which ``advance_call`` computes the next part."""
        return self._call is not None and self.error is None

    def advance_call(self) -> None:
        """Compute the next part of a module call; after the last part, send the result."""
        call = self._call
        assert call is not None  # noqa: S101 - see ``is_calling``
        self._guarded(lambda: self._serve(lambda: self._advance(call)))

    def _begin_call(self, call: CallRequest, content: memoryview) -> None:
        """Decode a call's arguments, check them, and begin the call, which ``advance_call`` computes."""
        tensors_sent = Tensors(content)
        args = [
            tensors_sent.next(argument) if isinstance(argument, ValueSlot) else argument
            for argument in call.args
        ]
        kwargs = {
            name: tensors_sent.next(argument) if isinstance(argument, ValueSlot) else argument
            for name, argument in call.kwargs.items()
        }
        tensors_sent.check_end()
        self._call = self._served.begin_call(call.path, args, kwargs)
        self._worked_before_call_s = self._worked_s

    def _advance(self, call: ModuleCall) -> None:
        call.advance()
        if call.is_done:
            value = map_tensors(call.result(), lambda leaf: plain(leaf).cpu())
            self._return(
                packed(
                    CallResult(), encode_pieces(RowStore().keep(value), reference=RowsPlaceholder.reference)
                )
            )

    def _serve(self, act: Callable[[], None]) -> None:
        """Do a part of a module call, charged to the budget; an error is the call's result.

        A call that takes too long for a step is ended with an error too.
        """
        listener, self._dispatcher.listener = self._dispatcher.listener, 0
        begin = time.monotonic()
        try:
            with self._served.adapters.using(self.adapter):
                act()
        except (SandboxEndedError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - raised in the block
            self._return(packed(CallResult(encode_error(error))))
        finally:
            self._dispatcher.listener = listener
            self._worked_s += time.monotonic() - begin
        call = self._call
        if call is not None and self._takes_too_long(call):
            self._return(
                packed(
                    CallResult(encode_error(SandboxedError.costly(call.path, call.num_rows, self._budget_s)))
                )
            )

    def _takes_too_long(self, call: ModuleCall) -> bool:
        """Return whether the call will exceed the budget of a step, as estimated from its first parts."""
        took_s = self._worked_s - self._worked_before_call_s
        is_known = call.num_done >= _KNOWN_PARTS * call.part_rows
        whole_s = took_s * call.num_rows / call.num_done if is_known else took_s
        return self._worked_before_call_s + whole_s > self._budget_s

    def _return(self, answer: list[bytes | memoryview]) -> None:
        self._call = None
        self._send(answer)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call ``act``; an error ends this process, and its requests fail, but not the engine's step."""
        if self.error is not None:
            return
        try:
            act()
        except SandboxEndedError as error:
            self.give_up(error)
        except OSError:
            self.give_up(SandboxEndedError.gone())
        except ValueError as error:  # the message is too large to be sent
            self.give_up(error)
        except Exception as error:  # noqa: BLE001 - nothing that a process does may end the engine's step
            self.give_up(SandboxEndedError.broken(f"what it said is of no use: {error}"))

    def give_up(self, error: Exception) -> None:
        """End the process prematurely; its requests fail."""
        if self.error is not None:
            return
        logger.info("a sandbox was ended: %s", error)
        self.error = error
        self._cpu_s = self._read_cpu_s()
        self.end_process()
        self._on_end()

    def end_process(self) -> None:
        if self.sandbox is not None:
            self.sandbox.end()

    # Time budget.

    @contextlib.contextmanager
    def _charged(self) -> Iterator[None]:
        """Charge the worker's CPU time in the context to the budget: large messages take time to copy."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self._worked_s += time.thread_time() - begin

    def refill(self) -> None:
        """Reset its budget to that of one step; end it if it has used the budget of the whole trace."""
        self._trace_s -= self._used_s()
        self._cpu_s, self._worked_s = self._read_cpu_s(), 0.0
        self._left_s = min(self._budget_s + _GRACE_S, self._trace_s)
        if self._trace_s <= 0:
            self.give_up(SandboxEndedError.long())

    def allow_reading(self) -> None:
        self._left_s += _READ_S

    def _used_s(self) -> float:
        return max(self._read_cpu_s() - self._cpu_s, 0.0) + self._worked_s

    def end_if_late(self, *, at_once: bool = False) -> bool:
        """End the process if it is over budget, or ``at_once`` regardless; return whether it has ended."""
        if self.error is not None:
            return True
        if self.sandbox is None:
            if at_once or time.monotonic() - self._sent_at > _START_S:
                self.give_up(self._source.error())
            return self.error is not None
        used_s, wall_s = self._used_s(), time.monotonic() - self._sent_at
        if used_s > self._left_s or wall_s > _WALL * (self._budget_s + _GRACE_S) or at_once:
            is_long = used_s > self._trace_s
            self.give_up(SandboxEndedError.long() if is_long else SandboxEndedError.late(self._budget_s))
        return self.error is not None

    def take_spent(self) -> float:
        """Return the larger of the worker's wait and the process's CPU seconds since the last call."""
        before, self._reported_cpu_s = self._reported_cpu_s, self._read_cpu_s()
        waited_s, self.waited_s = self.waited_s, 0.0
        return max(waited_s, self._reported_cpu_s - before)

    def _read_cpu_s(self) -> float:
        """Return the process's CPU seconds, or those last known."""
        if self.sandbox is not None:
            with contextlib.suppress(OSError):
                return self.sandbox.cpu_s()
        return getattr(self, "_cpu_s", 0.0)  # it has exited: its final CPU time is unknown


def _nothing(reply: ContinueReply | Collected, content: memoryview) -> None: ...
