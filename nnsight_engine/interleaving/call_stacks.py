"""Stacks that take turns: the model runs on one, each traced block on its own, and control is handed over.

A block waits in the middle of its code until the model reaches the value it asked for. That needs two call
stacks, of which one runs at a time. Greenlets give them within one thread, so a hand-over costs a switch
rather than two locks, and thread-local state (grad mode aside, see ``mediator``) is the model's own.

**The hazard.** Greenlets share one region of the C stack: the part below a greenlet's first frame is copied
in and out. What lies *above* that first frame is whatever runs there now. Torch walks the whole C stack when
it makes a C++ error (``c10::Error`` keeps a backtrace); a walk that leaves the greenlet through its first
frame then reads other frames' bytes as return addresses, and may crash the process.

**The safeguard.** Every stack, the model's included, is started by one hub, from one call site, and the hub
does nothing else until the outermost run ends. So all stacks begin at the same address, and what lies above
is always the hub's own suspended frames: real ones, in the same place, that a walk may follow to ``main``.
Four rules follow, and ``tests/unit/interleaving/test_call_stacks.py`` breaks without them:

1. nobody calls ``switch`` on a stack that has not started, except ``_hub``; ask with ``start``;
2. nobody calls ``throw``; a stack that must end its job is handed something that makes it raise;
3. a stack hands over to its ``parent``, so whoever resumes a stack becomes its parent first;
4. a stack is used again in a later run only if that run's hub stands at the very same address.

**Why used again.** Python gives each new stack memory for its frames and takes it back at the end: two system
calls, which cost more than everything else a small trace does. So a stack whose job is done waits for the
next one. Where the hub's address cannot be told (an unknown machine), stacks are simply made anew.
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
"""Stacks that wait for another job, at one address."""

_MAX_ADDRESSES = 16
"""Addresses that stacks wait at: the depths at which a program opens traces."""

_MAX_NESTED = 256
"""Runs within runs; each has a stack and a recursion limit of its own, so nothing else would stop them."""

_STACK_POINTER_IN_JMP_BUF = {("Linux", "x86_64"): 48, ("Linux", "aarch64"): 104}
"""Where ``_setjmp`` notes the stack pointer; scrambled, but the same for the same address."""


class _Idle(OrderedDict[int, list[greenlet]]):
    """A thread's stacks without a job, by address, the address least recently used first.

    A stack is ended here only while no run is on. Ending one means running it, where it began; were that not
    where this run's stacks begin, it would overwrite the frames that a walk from them passes.
    """

    def at(self, address: int) -> list[greenlet]:
        """Return those that wait at ``address``, which is used now."""
        own = self.get(address)
        if own is None:
            own = self[address] = []
        else:
            self.move_to_end(address)
        return own

    def trim(self, own: list[greenlet]) -> None:
        """End the stacks that are too many, in all or of the list used last."""
        while len(own) > _MAX_IDLE:
            _end(own.pop())
        while len(self) > _MAX_ADDRESSES:
            for stack in self.popitem(last=False)[1]:
                _end(stack)

    def __del__(self) -> None:
        """End all when the thread ends, or greenlet would keep them for ever."""
        if sys.is_finalizing():
            return
        for own in self.values():
            for stack in own:
                _end(stack)


def _end(stack: greenlet) -> None:
    stack.parent = getcurrent()
    stack.switch([])


class _Thread:
    """What belongs to one thread.

    Attributes:
        hub: Starts every stack while a run is on.
        nested: Runs within the outermost one.
        idle: Stacks without a job.
        waiting: Those at this run's address; None if the address cannot be told.
        registers: Where ``_setjmp`` puts the registers.
        pointer: The stack pointer among them; None on an unknown machine.
    """

    __slots__ = ("hub", "idle", "nested", "pointer", "registers", "waiting")

    def __init__(self) -> None:
        self.hub: greenlet | None = None
        self.nested = 0
        self.idle = _Idle()
        self.waiting: list[greenlet] | None = None
        buffer = ctypes.create_string_buffer(1024)
        offset = _STACK_POINTER_IN_JMP_BUF.get((platform.system(), platform.machine()))
        self.pointer = None if offset is None else ctypes.c_size_t.from_buffer(buffer, offset)
        self.registers = ctypes.byref(buffer)


class _Local(threading.local):
    """This thread's own; looked up once by each function, which is slow."""

    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()
_note_registers = ctypes.PyDLL(None)._setjmp if platform.system() == "Linux" else None  # noqa: SLF001 - libc's name
if _note_registers is not None:
    _note_registers.restype = None


class Done:
    """What a stack hands over when its job is done: the result, or the error."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        """Keep either."""
        self.value = value
        self.error = error

    def empty(self) -> tuple[Any, BaseException | None]:
        """Return result and error, and keep neither: the stack that waits holds this object."""
        value, error = self.value, self.error
        self.value = self.error = None
        return value, error


def run(body: Callable[[], Any]) -> Any:
    """Run ``body`` on a stack of its own and return what it returns; its errors come out here.

    Nested runs (a trace inside a block, a backward pass inside a trace) share the outermost run's hub.
    """
    thread = _local.thread
    if thread.hub is not None:
        if thread.nested >= _MAX_NESTED:
            raise RecursionError(f"runs nest {_MAX_NESTED} deep; does a traced block trace itself?")
        thread.nested += 1
        try:
            stack = take()
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
    """Raise an error on another stack than its own, where something else is being handled perhaps."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error  # its traceback holds this frame


def _hub(thread: _Thread, hub: greenlet, body: Callable[[], Any]) -> Done:
    """Run ``body`` on a stack, and start each further one that is asked for, until it is done."""
    if thread.pointer is not None and _note_registers is not None:
        _note_registers(thread.registers)
        thread.waiting = thread.idle.at(thread.pointer.value)
    first = take()
    first.parent = hub
    stack, job = first, body
    while True:
        # The one call site: every stack begins right below this frame. Through a partial, because Python
        # calls a builtin method in another way while a debugger or profiler is on, and stacks would begin
        # elsewhere.
        asked = functools.partial(stack.switch, [job])()
        if type(asked) is Done:
            give_back(first)
            return asked
        stack, job = asked


def take() -> Stack:
    """Return a stack without a job: one that waits at this run's address, or a new one."""
    waiting = _local.thread.waiting
    stack = waiting.pop() if waiting else greenlet(_work)
    stack.gr_context = contextvars.copy_context()
    return stack


def give_back(stack: Stack) -> None:
    """Keep a stack whose job is done for another one."""
    waiting = _local.thread.waiting
    if waiting is not None and not stack.dead:
        waiting.append(stack)


def start(stack: Stack, job: Callable[[], Any]) -> Any:
    """Give ``stack`` a job and return what it first hands over; within a run only."""
    if stack:  # it has started, and waits at the right address
        return resume(stack, [job])
    stack.parent = getcurrent()
    hub = _local.thread.hub
    assert hub is not None  # noqa: S101 - run() made it
    return hub.switch((stack, job))


def resume(stack: Stack, payload: Any) -> Any:
    """Hand ``payload`` to a stack in the middle of its job and return what it hands back."""
    caller = getcurrent()
    if stack.parent is not caller:
        stack.parent = caller
    return stack.switch(payload)


def _work(box: list[Callable[[], Any]]) -> None:
    """Do one job after the other; nothing of a job is kept while waiting for the next.

    C holds on to what a stack was first called with, and to what it hands over while it waits. So a job comes
    in a box and is taken out, and whoever gets a ``Done`` empties it. An empty box ends the stack.
    """
    while box:
        job = box.pop()
        try:
            done = Done(job())
        except BaseException as error:  # noqa: BLE001 - raised by whoever gave the job
            done = Done(error=error)
        del job
        handed = [done]
        del done
        box = resumed_by(getcurrent()).switch(handed.pop())


def resumed_by(stack: Stack) -> Stack:
    """Return the stack that ``stack`` hands over to: whoever started or resumed it."""
    parent = stack.parent
    assert parent is not None  # noqa: S101 - only a thread's main stack has none
    return parent
