"""Stacks take turns, and whoever walks the C stack from inside one gets to where the thread began.

The walk is glibc's ``backtrace``, the one that torch makes for each of its C++ errors. It is right if it ends
like a walk outside of any stack; ``deep`` makes C frames, as calls through ``map`` do and plain ones do not.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import gc
import platform
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from greenlet import getcurrent, greenlet

from nnsight_engine.interleaving import call_stacks

T = TypeVar("T")

MOST_FRAMES = 20_000
END = 3
"""Frames at the end of a walk that are compared: the process's, or the thread's, first ones."""

walks = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the walk is glibc's backtrace()")


def walk() -> list[int]:
    """Return the return addresses on the C stack, innermost first."""
    frames = (ctypes.c_void_p * MOST_FRAMES)()
    number = ctypes.CDLL(None).backtrace(frames, MOST_FRAMES)
    assert number < MOST_FRAMES
    return [int(frame or 0) for frame in frames[:number]]


def deep(levels: int, function: Callable[[], T]) -> T:
    """Call ``function`` below this many more levels of C frames."""
    if not levels:
        return function()
    return next(iter(list(map(lambda _: deep(levels - 1, function), [0]))))  # noqa: C417 - C frames, on purpose


class Walker:
    """Checks walks against one that was made outside of any stack."""

    def __init__(self) -> None:
        self.end = walk()[-END:]
        self.number = 0

    def check(self) -> None:
        assert walk()[-END:] == self.end
        self.number += 1


def hand_over(stack: call_stacks.Stack, value: Any = None) -> Any:
    """From inside ``stack``: let whoever started or resumed it go on."""
    return call_stacks.resumed_by(stack).switch(value)


def finish(stack: call_stacks.Stack) -> None:
    """Resume a stack until its job is done."""
    while type(done := call_stacks.resume(stack, None)) is not call_stacks.Done:
        pass
    call_stacks.give_back(stack)
    if done.error is not None:
        raise done.error


@pytest.fixture
def without_tracers() -> Iterator[None]:
    tracer, profiler = sys.gettrace(), sys.getprofile()
    yield
    sys.settrace(tracer)
    sys.setprofile(profiler)


# The walk.


@walks
@pytest.mark.parametrize("seed", range(3))
def test_walk_is_right_in_many_stacks_that_take_turns_at_random_depths(seed: int) -> None:
    chance = random.Random(seed)
    walker = Walker()

    def job(stack: call_stacks.Stack) -> None:
        def once() -> None:
            walker.check()
            hand_over(stack)
            walker.check()

        for _ in range(chance.randint(1, 6)):
            deep(chance.randint(0, 25), once)
        walker.check()

    def begin() -> call_stacks.Stack:
        stack = call_stacks.take_stack()
        done = deep(chance.randint(0, 25), lambda: call_stacks.start(stack, lambda: job(stack)))
        assert type(done) is not call_stacks.Done
        return stack

    def body() -> None:
        waiting = [begin() for _ in range(12)]
        while waiting:
            stack = chance.choice(waiting)
            done = deep(chance.randint(0, 25), lambda: call_stacks.resume(stack, None))  # noqa: B023 - called at once
            walker.check()
            if type(done) is call_stacks.Done:
                assert done.error is None
                waiting.remove(stack)
                call_stacks.give_back(stack)
                if chance.random() < 0.2:
                    waiting.append(begin())  # most likely on a stack that has done a job before

    for _ in range(4):
        deep(chance.randint(0, 30), lambda: call_stacks.run(body))
    assert walker.number > 200


@walks
def test_walk_is_right_in_stacks_used_again_at_many_depths() -> None:
    walker = Walker()
    for _ in range(3):
        for depth in range(24):  # more addresses than are kept
            deep(depth, lambda: call_stacks.run(lambda: call_stacks.run(walker.check)))
    assert walker.number == 72


@walks
def test_walk_is_right_in_another_thread() -> None:
    checked = []

    def work() -> None:
        walker = Walker()
        for depth in (0, 3, 40, 0):
            deep(depth, lambda: call_stacks.run(lambda: deep(depth, walker.check)))  # noqa: B023 - called at once
        checked.append(walker.number)

    call_stacks.run(lambda: None)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert checked == [4, 4, 4]


def ignore(*_: Any) -> None:
    """Trace or profile nothing."""


@walks
@pytest.mark.parametrize("switch_on", [sys.settrace, sys.setprofile])
def test_walk_is_right_when_a_tracer_comes_and_goes_within_a_run(
    switch_on: Callable[[Any], None], without_tracers: None
) -> None:
    walker = Walker()

    def waits_in_the_middle(tracer: Callable[..., None] | None) -> call_stacks.Stack:
        stack = call_stacks.take_stack()

        def job() -> None:
            walker.check()
            hand_over(stack)
            walker.check()

        switch_on(tracer)
        call_stacks.start(stack, job)
        return stack

    def body() -> None:
        waiting = [waits_in_the_middle(tracer) for tracer in (None, ignore, None, ignore, None)]
        walker.check()
        for stack in waiting:
            finish(stack)

    call_stacks.run(body)
    assert walker.number == 11


# Errors, of torch above all.


def torch_error() -> None:
    with pytest.raises(RuntimeError, match=r"inconsistent|size|1D tensors"):
        torch.zeros(3) @ torch.zeros(4)


def test_torch_errors_are_survived_hundreds_of_times_at_any_depth() -> None:
    chance = random.Random(0)

    def fails_often(stack: call_stacks.Stack) -> None:
        for _ in range(4):
            deep(chance.randint(0, 40), torch_error)
            deep(chance.randint(0, 40), lambda: hand_over(stack))
            deep(chance.randint(0, 40), torch_error)

    def body() -> None:
        waiting = []
        for _ in range(6):
            stack = call_stacks.take_stack()
            deep(chance.randint(0, 40), lambda: call_stacks.start(stack, lambda: fails_often(stack)))  # noqa: B023
            waiting.append(stack)
        for stack in waiting:
            deep(chance.randint(0, 40), torch_error)
            deep(chance.randint(0, 40), lambda: finish(stack))  # noqa: B023 - called at once

    for _ in range(5):
        deep(chance.randint(0, 60), lambda: call_stacks.run(body))


def test_torch_error_while_other_stacks_wait_deep_in_torch() -> None:
    """A function that torch calls back waits, so the waiting stack holds torch's own C++ frames."""

    def body() -> None:
        stack = call_stacks.take_stack()

        def job() -> None:
            tensor = torch.zeros(2, requires_grad=True)
            doubled = tensor * 2
            doubled.register_hook(lambda gradient: hand_over(stack) or gradient)
            with torch.autograd.set_multithreading_enabled(mode=False):
                doubled.sum().backward()

        call_stacks.start(stack, job)
        for _ in range(50):
            deep(5, torch_error)
        finish(stack)

    call_stacks.run(body)


# Results and errors of run().


class Odd(BaseException):
    """Neither an Exception nor anything known."""


@pytest.mark.parametrize(
    "kind", [ValueError, KeyboardInterrupt, SystemExit, Odd, StopIteration, GeneratorExit]
)
def test_errors_of_the_body_come_out_of_run(kind: type[BaseException]) -> None:
    error = kind("no")

    def body() -> None:
        raise error

    with pytest.raises(kind) as caught:
        call_stacks.run(body)
    assert caught.value is error
    assert error.__context__ is None
    assert call_stacks.run(lambda: "usable") == "usable"


def test_errors_keep_their_own_context_and_not_the_callers() -> None:
    def body() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904 - the context is the subject

    def run_while_handling() -> None:
        try:
            raise OSError("the caller's")
        except OSError:
            call_stacks.run(body)

    with pytest.raises(ValueError, match="second") as caught:
        run_while_handling()
    assert isinstance(caught.value.__context__, KeyError)
    assert caught.value.__context__.__context__ is None


def test_what_is_being_handled_on_one_stack_is_not_on_another() -> None:
    def body() -> list[object]:
        stack = call_stacks.take_stack()
        seen: list[object] = []

        def job() -> None:
            seen.append(sys.exc_info()[1])
            try:
                raise ValueError("the job's")
            except ValueError:
                hand_over(stack)
                seen.append(sys.exc_info()[0])

        try:
            raise OSError("the caller's")
        except OSError:
            call_stacks.start(stack, job)
            seen.append(sys.exc_info()[0])
        finish(stack)
        return seen

    assert call_stacks.run(body) == [None, OSError, ValueError]


def test_recursion_error_in_a_stack_is_an_ordinary_error() -> None:
    def endless(number: int) -> int:
        return endless(number + 1) + 1

    def body() -> str:
        for _ in range(3):
            with pytest.raises(RecursionError):
                endless(0)
            with pytest.raises(RecursionError):
                call_stacks.run(lambda: endless(0))
        return "alive"

    assert call_stacks.run(body) == "alive"
    with pytest.raises(RecursionError):
        call_stacks.run(lambda: endless(0))


def test_recursion_limit_counts_what_stands_above_a_run() -> None:
    """Else a program could nest runs until the C stack overflows, which no error stops."""

    def levels_left() -> int:
        try:
            return levels_left() + 1
        except RecursionError:
            return 0

    plain = levels_left()
    inside: int = call_stacks.run(levels_left)
    below: int = deep(40, lambda: call_stacks.run(levels_left))
    assert plain - 30 < inside <= plain
    assert below < inside - 40


def test_runs_within_runs_without_end_are_a_recursion_error() -> None:
    def endless(levels: int = 0) -> None:
        assert levels < 3 * sys.getrecursionlimit(), "nothing stops it"
        call_stacks.run(lambda: endless(levels + 1))

    with pytest.raises(RecursionError):
        endless()
    assert call_stacks.run(lambda: 2) == 2


# What is shared and what is kept.

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")


def test_context_variables_of_the_caller_are_visible_and_those_set_in_a_stack_stay_there() -> None:
    token = variable.set("the caller's")

    def body() -> str:
        assert variable.get() == "the caller's"
        variable.set("the body's")
        return call_stacks.run(variable.get)  # type: ignore[no-any-return]

    try:
        assert call_stacks.run(body) == "the body's"
        assert variable.get() == "the caller's"
    finally:
        variable.reset(token)
    assert call_stacks.run(variable.get) == "default", "a stack used again has its new run's context"


def test_stacks_are_used_again() -> None:
    def both() -> set[int]:
        return {id(call_stacks.run(getcurrent)) for _ in range(20)}

    if platform.system() == "Linux" and platform.machine() in {"x86_64", "aarch64"}:
        assert len({id(call_stacks.run(getcurrent)) for _ in range(20)}) == 1
        assert len(call_stacks.run(both)) == 1


def test_idle_stacks_are_bounded() -> None:
    def many() -> None:
        waiting = []
        for _ in range(200):
            stack = call_stacks.take_stack()
            call_stacks.start(stack, functools.partial(hand_over, stack))
            waiting.append(stack)
        for stack in waiting:
            finish(stack)

    def number() -> int:
        gc.collect()
        return sum(type(one) is greenlet for one in gc.get_objects())

    before = number()
    for depth in range(40):
        deep(depth, lambda: call_stacks.run(many if depth == 39 else lambda: None))  # noqa: B023 - called at once
    assert number() - before <= 64 + 40


def test_nothing_of_a_job_is_kept_by_its_stack() -> None:
    class Kept:
        alive = 0

        def __init__(self) -> None:
            Kept.alive += 1

        def __del__(self) -> None:
            Kept.alive -= 1

    def make(value: Kept) -> Callable[[], Kept]:
        return lambda: value

    call_stacks.run(make(Kept()))
    gc.collect()
    assert Kept.alive == 0


def test_program_that_exits_in_the_middle_of_a_run_ends_quietly() -> None:
    program = """
        import sys
        from nnsight_engine.interleaving import call_stacks

        def body():
            stack = call_stacks.take_stack()
            call_stacks.start(stack, lambda: call_stacks.resumed_by(stack).switch("waits"))
            sys.exit(7)

        call_stacks.run(body)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")


def test_users_own_greenlets_can_run_and_be_run() -> None:
    def in_a_greenlet() -> int:
        return call_stacks.run(lambda: greenlet(lambda: 1).switch()) + 1  # type: ignore[no-any-return]

    assert greenlet(in_a_greenlet).switch() == 2
    assert call_stacks.run(lambda: greenlet(in_a_greenlet).switch()) == 2
