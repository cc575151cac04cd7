"""Cooperative call stacks: the model runs on one, each traced block on its own; one runs at a time.

Greenlets provide them within one thread: a hand-over costs a switch rather than two locks, and thread-local
state is shared with the model (except for grad mode, see ``thread_state``).

**The hazard.** Greenlets share one region of the C stack: the part below a greenlet's first frame is copied
in and out. The frames *above* that first frame belong to whatever code runs there now. Torch walks the whole
C stack when it creates a C++ error (``c10::Error`` records a backtrace); a walk that leaves the greenlet
through its first frame then reads other frames' bytes as return addresses, and may crash the process.

**The safeguard.** One hub starts all stacks, the model's included, from one call site, and does nothing else
until the outermost run ends. So all stacks begin at the same address, and the frames above it are always the
hub's own suspended frames, through which a walk can reach ``main``. Four rules follow;
``tests/unit/interleaving/test_call_stacks.py`` fails without them:

1. Only ``_hub`` calls ``switch`` on a stack that has not started; other code calls ``start``.
2. ``throw`` is never called; a stack whose job must end is sent a payload that makes it raise.
3. A stack hands over to its ``parent``, so the code that resumes a stack makes itself its parent first.
4. A stack is reused in a later run only if that run's hub is at the same address.

**Why stacks are reused.** A new stack costs two system calls for memory, more than the rest of a small trace.
Where the hub's address cannot be determined (an unknown platform), every job gets a new stack.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import platform
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from greenlet import getcurrent, greenlet

Stack = greenlet

_MAX_IDLE = 64
"""Maximum number of idle stacks at one address."""

_MAX_ADDRESSES = 16
"""Maximum number of addresses with idle stacks: one for each stack depth at which a program opens traces."""

_MAX_NESTED = 256
"""Maximum nesting of runs. Each has a stack and a recursion limit of its own, so Python would not stop them.
"""

_STACK_POINTER_IN_JMP_BUF = {("Linux", "x86_64"): 48, ("Linux", "aarch64"): 104}
"""Offset of the stack pointer in ``_setjmp``'s buffer; it is mangled, but equal for equal addresses."""

_MAX_JMP_BUF_BYTES = 1024
"""More than the size of that buffer on any of these platforms."""


class _Idle(OrderedDict[int, list[greenlet]]):
    """A thread's idle stacks by address, the address least recently used first.

    Stacks are ended here only while no run is active: ending one runs it at the address where it began, which
    could overwrite frames that a stack walk of the active run passes.
    """

    def stacks_at(self, address: int) -> list[greenlet]:
        """Return the list of idle stacks at an address, which becomes the most recently used."""
        stacks = self.get(address)
        if stacks is None:
            stacks = self[address] = []
        else:
            self.move_to_end(address)
        return stacks

    def trim(self, stacks: list[greenlet]) -> None:
        """End the stacks beyond the limits; only while no run is active."""
        while len(stacks) > _MAX_IDLE:
            _end_stack(stacks.pop())
        while len(self) > _MAX_ADDRESSES:
            for stack in self.popitem(last=False)[1]:
                _end_stack(stack)

    def __del__(self) -> None:
        """End all idle stacks when the thread ends; otherwise greenlet would keep them forever."""
        if sys.is_finalizing():
            return
        for stacks in self.values():
            for stack in stacks:
                _end_stack(stack)


def _end_stack(stack: greenlet) -> None:
    stack.parent = getcurrent()
    stack.switch([])


class _Thread:
    """State of one thread; ``hub`` starts every other stack during a run, and is None without one.

    ``waiting`` has the idle stacks at this run's address; None if that cannot be determined. ``pointer`` is
    the stack pointer in ``registers``, the buffer of ``_setjmp``; None on an unknown platform.
    """

    __slots__ = ("hub", "idle", "nested", "pointer", "registers", "waiting")

    def __init__(self) -> None:
        self.hub: greenlet | None = None
        self.nested = 0
        self.idle = _Idle()
        self.waiting: list[greenlet] | None = None
        jmp_buf = ctypes.create_string_buffer(_MAX_JMP_BUF_BYTES)
        offset = _STACK_POINTER_IN_JMP_BUF.get((platform.system(), platform.machine()))
        self.pointer = None if offset is None else ctypes.c_size_t.from_buffer(jmp_buf, offset)
        self.registers = ctypes.byref(jmp_buf)


class _Local(threading.local):
    """The state of the current thread; access is slow, so each function reads it once."""

    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()
_note_registers = ctypes.PyDLL(None)._setjmp if platform.system() == "Linux" else None  # noqa: SLF001 - libc's name
if _note_registers is not None:
    _note_registers.restype = None


class Done:
    """The message that a stack hands over when its job is done: the result, or the error."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error

    def empty(self) -> tuple[Any, BaseException | None]:
        """Return result and error, and drop both: the idle stack still refers to this object."""
        value, error = self.value, self.error
        self.value = self.error = None
        return value, error


def run(body: Callable[[], Any]) -> Any:
    """Run ``body`` on a stack of its own and return its result; nested runs share the outermost run's hub."""
    thread = _local.thread
    if thread.hub is not None:
        if thread.nested >= _MAX_NESTED:
            raise RecursionError(f"runs nest {_MAX_NESTED} deep; does a traced block trace itself?")
        thread.nested += 1
        try:
            stack = take_stack()
            done = start(stack, body)
            give_back(stack)
        finally:
            thread.nested -= 1
    else:
        thread.hub = getcurrent()
        try:
            done = _hub(thread, thread.hub, body)
        finally:
            thread.hub = None
            waiting, thread.waiting = thread.waiting, None
            if waiting is not None:
                thread.idle.trim(waiting)
    value, error = done.empty()
    if error is not None:
        _raise(error)
    return value


def _raise(error: BaseException) -> NoReturn:
    """Raise an error from another stack; keep its context, even while another error is handled here."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error  # its traceback refers to this frame


def _hub(thread: _Thread, hub: greenlet, body: Callable[[], Any]) -> Done:
    """Start the stacks of a run, the model's first, see the module; return when the model's is done."""
    if thread.pointer is not None and _note_registers is not None:
        _note_registers(thread.registers)
        thread.waiting = thread.idle.stacks_at(thread.pointer.value)
    model_stack = take_stack()
    model_stack.parent = hub
    stack, job = model_stack, body
    while True:
        # The only call site: every stack begins directly below this frame. It calls through a partial,
        # because Python calls a builtin method in another way while a debugger or profiler is active, and
        # stacks would begin at another address.
        outcome = functools.partial(stack.switch, [job])()
        if type(outcome) is Done:
            give_back(model_stack)
            return outcome
        stack, job = outcome


def take_stack() -> Stack:
    """Return a stack, an idle one if possible, for a job with the caller's context variables."""
    waiting = _local.thread.waiting
    stack = waiting.pop() if waiting else greenlet(_run_jobs)
    stack.gr_context = contextvars.copy_context()
    return stack


def give_back(stack: Stack) -> None:
    """Keep a stack whose job is done for later jobs."""
    waiting = _local.thread.waiting
    if waiting is not None and not stack.dead:
        waiting.append(stack)


def start(stack: Stack, job: Callable[[], Any]) -> Any:
    """Start ``job`` on ``stack`` and return the first payload that it hands over; only within a run."""
    if stack:  # it has started, and is idle at the right address
        return resume(stack, [job])
    stack.parent = getcurrent()
    hub = _local.thread.hub
    assert hub is not None  # noqa: S101 - run() made it
    return hub.switch((stack, job))


def resume(stack: Stack, payload: Any) -> Any:
    """Send a payload to a stack, which hands over to this one afterwards; return what it hands over."""
    caller = getcurrent()
    if stack.parent is not caller:
        stack.parent = caller
    return stack.switch(payload)


def _run_jobs(box: list[Callable[[], Any]]) -> None:
    """Run one job after the other; no reference to a job is kept while waiting for the next one.

    C code keeps references to a stack's first argument, and to the object that it hands over while it waits.
    So a job is popped from a list, and the receiver of a ``Done`` empties it. An empty list ends the stack.
    """
    while box:
        job = box.pop()
        try:
            done = Done(job())
        except BaseException as error:  # noqa: BLE001 - raised by the caller that gave the job
            done = Done(error=error)
        del job
        handed = [done]
        del done
        box = resumed_by(getcurrent()).switch(handed.pop())


def resumed_by(stack: Stack) -> Stack:
    """Return the stack that ``stack`` hands over to: the one that started or resumed it last."""
    parent = stack.parent
    assert parent is not None  # noqa: S101 - only a thread's main stack has none
    return parent
