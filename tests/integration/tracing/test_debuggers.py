"""Debuggers, coverage and profilers see blocks like any code, and a trace leaves them as they were.

A trace uses Python's trace function itself, to leave its block, and each stack has a tracing state.
"""

from __future__ import annotations

import bdb
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from tests.integration.tracing.ways import (
    RefusedError,
    X,
    fails_in_the_block,
    saves,
    shares_between_invokes,
    stops,
)
from tests.small_models import Rows


class Coverage:
    """Notes the lines of one file, as coverage does."""

    def __init__(self) -> None:
        self.lines: set[int] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != __file__:
            return None
        if event == "line":
            self.lines.add(frame.f_lineno)
        return self


def lines_with(text: str, code: CodeType) -> set[int]:
    """Return the numbers of the lines of a function that end in this comment."""
    source = Path(__file__).read_text().splitlines()
    first = code.co_firstlineno
    end = next((n for n in range(first, len(source)) if source[n].startswith("def ")), len(source)) + 1
    return {number for number in range(first, end) if source[number - 1].endswith(f"# {text}")}


def watched(model: Rows) -> torch.Tensor:
    before = X  # runs
    with model.trace(before) as tracer:  # runs
        hidden = model[1].output  # runs
        if hidden is None:  # runs
            tracer.stop()
        model[2].output = hidden * 2  # runs
        out = model.output.save()  # runs
    after = out + 1  # runs
    with model.trace() as tracer:  # runs
        for row in (X, -X):  # runs
            with tracer.invoke(row):  # runs
                last = model.output.save()  # runs
    total: torch.Tensor = after + last  # runs
    return total  # runs


def watched_failing(model: Rows) -> str:
    try:  # runs
        with model.trace(X):  # runs
            model[1].output.save()  # runs
            raise RefusedError  # runs
    except RefusedError:  # runs
        result = "refused"  # runs
    return result  # runs


@pytest.mark.parametrize("function", [watched, watched_failing])
def test_coverage_sees_a_block_and_what_follows_and_stays_on(
    function: Callable[[Rows], Any], model: Rows, without_tracers: None
) -> None:
    for used_before in (False, True):
        coverage = Coverage()
        if used_before:
            function(model)  # stacks are kept from a run that nobody watched
        sys.settrace(coverage)
        try:
            function(model)
            still_on = sys.gettrace() is coverage
        finally:
            sys.settrace(None)
        assert still_on
        assert lines_with("runs", function.__code__) <= coverage.lines
        function(model)
        assert sys.gettrace() is None


class Stepper(bdb.Bdb):
    """Steps through everything, and notes the lines of one function and of what it calls in this file."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[int] = []

    def user_line(self, frame: FrameType) -> None:
        if frame.f_code.co_filename == __file__:
            self.lines.append(frame.f_lineno)
        self.set_step()


@pytest.mark.parametrize("function", [watched, watched_failing])
def test_debugger_steps_through_a_block_and_out_of_it(
    function: Callable[[Rows], Any], model: Rows, without_tracers: None
) -> None:
    stepper = Stepper()
    stepper.runcall(function, model)
    assert lines_with("runs", function.__code__) <= set(stepper.lines)
    assert stepper.lines[-1] == max(lines_with("runs", function.__code__))
    assert sys.gettrace() is None


def test_breakpoint_in_the_model_while_a_block_waits(
    module: torch.nn.Sequential, without_tracers: None
) -> None:
    """A tracer switched on on the model's side does not get lost when a block has run in between."""
    tracer = Coverage()

    class Breaks(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            sys.settrace(tracer)
            return value + 1

    class Looked(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * 2  # seen in the model

    module.append(Breaks())
    module.append(Looked())
    model = Rows(module)
    with model.trace(X):
        model[4].output.save()
        model[5].output.save()
    still_on = sys.gettrace() is tracer
    sys.settrace(None)
    assert still_on
    assert lines_with("seen in the model", Looked.forward.__code__) <= tracer.lines


def test_profiler_stays_on(model: Rows, without_tracers: None) -> None:
    names: set[str] = set()

    def profiler(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_name)

    saves(model)
    sys.setprofile(profiler)
    for way in (saves, stops, fails_in_the_block, shares_between_invokes):
        way(model)
        assert sys.getprofile() is profiler
    sys.setprofile(None)
    assert {"saves", "stops", "fails_in_the_block", "shares_between_invokes", "forward"} <= names
    saves(model)
    assert sys.getprofile() is None


def test_tracer_of_one_frame_survives_its_traces(model: Rows, without_tracers: None) -> None:
    """A debugger sets a frame's own trace function; a trace opened in that frame gives it back."""
    seen: list[int] = []

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen.append(frame.f_lineno)
        return local

    def function() -> int:
        sys.settrace(lambda *_: None)
        frame = sys._getframe()
        frame.f_trace = local
        with model.trace(X):
            model.output.save()
        assert frame.f_trace is local
        answer = 1  # seen
        frame.f_trace = None
        sys.settrace(None)
        return answer

    for _ in range(3):
        seen.clear()
        assert function() == 1
        assert lines_with("seen", function.__code__) <= set(seen)
