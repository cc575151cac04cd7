"""What the worker says to one sandboxed process, and what comes of it: asked now, answered later.

Nothing here waits. An answer is read when it has come, so several processes compute at once, and the model
need not wait for one that takes long (``wait_budget``). Between question and answer a process may have
modules called. What it may take is counted in its own processor time and in the worker's for its calls: by
the clock on the wall, a process is slow wherever the machine is busy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.sandbox.errors import SandboxEndedError
from nnsight_engine.serialization import encode_error
from nnsight_engine.serialization.message import Piece
from nnsight_engine.serialization.values import encode_pieces
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.rows import plain
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    CallRequest,
    Collected,
    Go,
    Returned,
    Tensors,
    ToSandbox,
    ValueSlot,
    packed,
    read_by_worker,
)
from nnsight_engine.vllm_backend.traces.stages.row_payloads import KeptRows, RowKeeper

if TYPE_CHECKING:
    from nnsight_engine.sandbox.forkserver import Sandbox
    from nnsight_engine.vllm_backend.traces.sandboxed.module_call import ModuleCall
    from nnsight_engine.vllm_backend.traces.sandboxed.module_policy import CallableModules
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

logger = logging.getLogger(__name__)

_GRACE_S: Final = 0.25
"""For a sandbox to interrupt a block itself, which tells its author where it was."""
_READ_S: Final = 0.02
"""For a sandbox to read one request's block, beside what all blocks may compute in a step."""
_SEND_S: Final = 1.0
"""For a message to be taken: a socket takes any that is sent through it at once."""
_WALL: Final = 30.0
"""How many times as long as it may compute an answer may take: the machine is busy, or it sleeps.

Many sandboxes on a small machine wait for each other, and they compute at the lowest priority.
"""

_KNOWN_PARTS: Final = 4
"""How long a call takes is known from so many of its parts."""

_Answer = TypeVar("_Answer", bound=Go | Collected)


class SandboxConnection:
    """The worker's side of what is said to one process.

    Args:
        sandbox: The process.
        board: Where the model's calls come from.
        served: Calls modules for it.
        max_bytes: Of an answer.
        budget_s: Seconds that it may compute within one step.
        trace_s: Seconds that it may in all steps.
        on_end: Told when the process is ended before its time.

    Attributes:
        error: Why it was ended before its time.
        waited_s: Seconds for which the worker has waited for it.
        is_held: Whether an answer that comes is kept until it is asked for, see ``take_held``.
        content: What stands behind the answer that was read last.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        board: TraceDispatcher,
        served: CallableModules,
        max_bytes: int,
        budget_s: float,
        trace_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """Say nothing yet."""
        self.sandbox = sandbox
        self.error: Exception | None = None
        self.waited_s = 0.0
        self.is_held = False
        self.content = memoryview(b"")
        self._board = board
        self._served = served
        self._max_bytes = max_bytes
        self._budget_s = budget_s
        self._trace_s = trace_s
        self._on_end = on_end
        self._answer: type[Any] | None = None
        self._then: Callable[[Any], None] | None = None
        self._came: tuple[Go | Collected, memoryview] | None = None
        self._asked_at = 0.0
        self._left_s = 0.0
        self._called_s = self._call_s = 0.0
        self._call: ModuleCall | None = None
        self._cpu_s = self._told_cpu_s = self._read_cpu_s()
        self.refill()

    @property
    def is_pending(self) -> bool:
        """Whether an answer has yet to come."""
        return self._answer is not None and self._came is None and self.error is None

    @property
    def is_unanswered(self) -> bool:
        """Whether an answer has yet to be taken note of, come or not."""
        return self._answer is not None and self.error is None

    def ask(
        self,
        head: ToSandbox,
        body: Sequence[Piece],
        answer: type[_Answer],
        then: Callable[[_Answer], None],
    ) -> None:
        """Say something; ``then`` is called with the answer when it has come.

        There may be one question at a time.
        """

        def say() -> None:
            self._asked_at = time.monotonic()
            self.sandbox.side.send(packed(head, body), self._asked_at + _SEND_S)
            self._answer, self._then = answer, then

        self._guarded(say)

    def pump(self) -> None:
        """Read what has come: the answer, or one call of a module."""
        if self.is_pending and not self.is_calling:
            self._guarded(self._read)

    def _read(self) -> None:
        data = self.sandbox.side.take(self._max_bytes)
        if data is None:
            return
        reply, content = read_by_worker(data)
        if isinstance(reply, CallRequest):
            self._serve(lambda: self._begin_call(reply, content))
            return
        if self._answer is None or not isinstance(reply, self._answer):
            raise SandboxEndedError.broken("it answered something else than it was asked")
        if content and not (isinstance(reply, Collected) or reply.changes):
            raise SandboxEndedError.broken("it sent bytes that nobody asked for")
        self._came = (reply, content)
        if not self.is_held:
            self._take()

    def take_held(self) -> None:
        """Take note of an answer that has come and was kept."""
        self.is_held = False
        if self._came is not None:
            self._guarded(self._take)

    def drop_answer(self) -> None:
        """Take no note of the answer to what was asked last, come or not."""
        self._then = _nothing
        self.take_held()

    def _take(self) -> None:
        assert self._came is not None  # noqa: S101 - an answer has come
        assert self._then is not None  # noqa: S101 - it was asked for
        (reply, self.content), then = self._came, self._then
        self._answer = self._then = self._came = None
        then(reply)

    @property
    def is_calling(self) -> bool:
        """Whether a call of a module has begun, of which ``call_on`` computes the next part."""
        return self._call is not None and self.error is None

    def call_on(self) -> None:
        """Compute the next part of a call of a module, and answer the call with the last one."""
        call = self._call
        assert call is not None  # noqa: S101 - see ``is_calling``
        self._guarded(lambda: self._serve(lambda: self._go_on(call)))

    def _begin_call(self, call: CallRequest, content: memoryview) -> None:
        given = Tensors(content)
        args = [given.next(one) if isinstance(one, ValueSlot) else one for one in call.args]
        kwargs = {
            name: given.next(one) if isinstance(one, ValueSlot) else one for name, one in call.kwargs.items()
        }
        self._call = self._served.begin(call.path, args, kwargs)
        self._call_s = self._called_s

    def _go_on(self, call: ModuleCall) -> None:
        call.go_on()
        if call.is_done:
            value = map_tensors(call.result(), lambda one: plain(one).cpu())
            self._return(
                packed(Returned(), encode_pieces(RowKeeper().keep(value), reference=KeptRows.reference))
            )

    def _serve(self, act: Callable[[], None]) -> None:
        """Do something for a call, on the trace's time; what goes wrong is raised in the block."""
        listener, self._board.listener = self._board.listener, 0
        begin = time.monotonic()
        try:
            act()
        except (SandboxEndedError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - raised in the block
            self._return(packed(Returned(encode_error(error))))
        finally:
            self._board.listener = listener
            self._called_s += time.monotonic() - begin
        call = self._call
        if call is not None and self._takes_too_long(call):
            self._return(
                packed(
                    Returned(encode_error(SandboxedError.costly(call.path, call.num_rows, self._budget_s)))
                )
            )

    def _takes_too_long(self, call: ModuleCall) -> bool:
        """Tell whether a call will take longer than what is left of the step, by what it took so far."""
        took_s = self._called_s - self._call_s
        is_known = call.num_done >= _KNOWN_PARTS * call.part_rows
        whole_s = took_s * call.num_rows / call.num_done if is_known else took_s
        return self._call_s + whole_s > self._budget_s

    def _return(self, answer: list[bytes | memoryview]) -> None:
        self._call = None
        self.sandbox.side.send(answer, time.monotonic() + _SEND_S)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Speak with the process, and end it if that fails."""
        if self.error is not None:
            return
        try:
            act()
        except SandboxEndedError as error:
            self.give_up(error)
        except OSError:
            self.give_up(SandboxEndedError.gone())
        except ValueError as error:  # too large to be said
            self.give_up(error)
        except Exception as error:  # noqa: BLE001 - nothing that a process does may end the engine's step
            self.give_up(SandboxEndedError.broken(f"what it said is of no use: {error}"))

    def give_up(self, error: Exception) -> None:
        """End the process before its time; its requests fail."""
        if self.error is not None:
            return
        logger.info("a sandbox was ended: %s", error)
        self.error = error
        self._cpu_s = self._read_cpu_s()
        self.sandbox.end()
        self._on_end()

    # What it may take.

    def refill(self) -> None:
        """Let it compute for as long as one step allows; end it if it has taken all that one trace may."""
        self._trace_s -= self._used_s()
        self._cpu_s, self._called_s = self._read_cpu_s(), 0.0
        self._left_s = min(self._budget_s + _GRACE_S, self._trace_s)
        if self._trace_s <= 0:
            self.give_up(SandboxEndedError.long())

    def allow_reading(self) -> None:
        """Let it compute for as long as reading one more block takes."""
        self._left_s += _READ_S

    def _used_s(self) -> float:
        """Return what it has taken since the last refill."""
        return max(self._read_cpu_s() - self._cpu_s, 0.0) + self._called_s

    def end_if_late(self, *, at_once: bool = False) -> bool:
        """End the process if it has taken more than it may; returns whether it is at its end.

        Args:
            at_once: End it although it has time left: the step has none.
        """
        if self.error is not None:
            return True
        used_s, wall_s = self._used_s(), time.monotonic() - self._asked_at
        if used_s > self._left_s or wall_s > _WALL * (self._budget_s + _GRACE_S) or at_once:
            is_long = used_s > self._trace_s
            self.give_up(SandboxEndedError.long() if is_long else SandboxEndedError.late(self._budget_s))
        return self.error is not None

    def take_spent(self) -> float:
        """Return the seconds that the trace took since last asked: the worker's, or the process's own."""
        before, self._told_cpu_s = self._told_cpu_s, self._read_cpu_s()
        waited_s, self.waited_s = self.waited_s, 0.0
        return max(waited_s, self._told_cpu_s - before)

    def _read_cpu_s(self) -> float:
        with contextlib.suppress(OSError):
            return self.sandbox.cpu_s()
        return getattr(self, "_cpu_s", 0.0)  # it is gone: what it used last is not known


def _nothing(reply: Go | Collected) -> None:
    """Take no note of an answer."""


__all__ = ["SandboxConnection"]
