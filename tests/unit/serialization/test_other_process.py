"""A trace and its results between two processes, of which one has none of the user's code."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from nnsight_engine.serialization import DATA_ONLY, decode, restore_error

PROJECT = Path(__file__).resolve().parents[3]
USER = """
import sys
import helpers_of_mine
from helpers_of_mine import Scaler, offset
from nnsight_engine.tracing.tracer import Info, Tracer
from nnsight_engine.serialization import SentBlock, encode_trace

class Config:
    def __init__(self, steps):
        self.steps = steps

class Sender(Tracer):
    def execute(self, function):
        sys.stdout.buffer.write(encode_trace([SentBlock(self.info, self.info.variables)]))

def main():
    scaler, config, results = Scaler(3), Config(4), []
    with Sender():
        for step in range(config.steps):
            with Tracer():
                results.append(scaler(step) + offset)
        results.append(helpers_of_mine.describe(config))
        results.append(config)
        results[99]

if __name__ == "__main__":
    main()
"""
HELPERS = """
import torch
offset = 1

class Scaler(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, value):
        return torch.tensor(value * self.by)

def describe(config):
    return f"{type(config).__name__} of {config.steps}"
"""
WORKER = """
import sys
from nnsight_engine.tracing.tracer import Tracer
from nnsight_engine.serialization import decode_trace, encode, encode_error
(info,) = decode_trace(sys.stdin.buffer.read()).blocks
try:
    Tracer().compile_on(info)()
except Exception as error:
    failure = encode_error(error)
results = info.variables["results"].cell_contents
sys.stdout.buffer.write(encode({"results": results, "failure": failure}))
"""


def python(folder: Path, *arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run(  # noqa: PLW1510 - what it printed says more than that it failed
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        cwd=folder,
        env={"PYTHONPATH": str(PROJECT)},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("codec", ["encode_trace", "encode_trace_pickled"])
def test_a_script_and_its_modules_run_where_they_are_not_installed(codec: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    script = USER.replace("encode_trace", codec)
    if codec == "encode_trace_pickled":  # what it makes of a class has no source, so no result can have it
        script = script.replace("results.append(config)", "pass")
    (here / "script.py").write_text(script)
    (here / "helpers_of_mine.py").write_text(HELPERS)
    trace = python(here, "script.py")
    (here / "script.py").rename(here / "moved.py")  # as if on another machine
    worker = WORKER.replace("decode_trace", codec.replace("encode", "decode"))
    answer = python(there, "-c", worker, given=trace)

    class Config:
        steps: int

    Config.__module__, Config.__qualname__ = "__main__", "Config"
    main: Any = sys.modules["__main__"]
    main.Config = Config
    try:
        arrived = decode(answer, policy=DATA_ONLY.allowing([Config]))
    finally:
        del main.Config
    *numbers, described = arrived["results"][:5]
    assert [int(number) for number in numbers] == [1, 4, 7, 10]
    assert described == "Config of 4"
    assert [(type(one), one.steps) for one in arrived["results"][5:]] == [(Config, 4)] * (
        codec == "encode_trace"
    )
    error = restore_error(arrived["failure"])
    assert isinstance(error, IndexError)
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert (last.filename, last.lineno, last.line) == (str(here / "script.py"), 24, "results[99]")


CLASSES = """
{future}
import dataclasses
import typing as t
from dataclasses import KW_ONLY, MISSING, InitVar, dataclass, field
from typing import ClassVar, NamedTuple

@dataclass
class Point:
    x: int
    scale: {quote}ClassVar[int]{quote} = 10
    origin: {quote}t.ClassVar[list[int]]{quote} = []
    seed: {quote}InitVar[int]{quote} = 3
    _: {quote}KW_ONLY{quote}
    y: {quote}t.Any{quote} = None

    def __post_init__(self, seed):
        self.x += seed

@dataclass(slots=True)
class Named(Point):
    name: {quote}str{quote} = ""

class Pair(NamedTuple):
    first: {quote}Point{quote}
    second: {quote}int{quote} = 0

def described(kind):
    return [(one.name, one.default is MISSING, one.kw_only) for one in dataclasses.fields(kind)]
"""
USING_CLASSES = """
from nnsight_engine.serialization import SentBlock, encode_trace
from nnsight_engine.tracing.tracer import Tracer
import sys

class Sender(Tracer):
    def execute(self, function):
        sys.stdout.buffer.write(encode_trace([SentBlock(self.info, self.info.variables)]))

def main():
    results = []
    with Sender():
        points = [Point(1, y=Point(2)), Point(5, 7)]
        results += [points[0].x, points[0].y.x, points[1].x, Point.scale, Pair(points[0]).second]
        results += [described(Point), described(Named)]

if __name__ == "__main__":
    main()
"""
FIELDS = [("x", True, False), ("y", False, True)]


FUTURE = "from __future__ import annotations"


@pytest.mark.parametrize(
    ("codec", "in_script", "future", "quote"),
    [
        ("encode_trace", True, FUTURE, ""),
        ("encode_trace", False, FUTURE, ""),
        ("encode_trace", False, "", '"'),
        ("encode_trace", False, "", ""),
        ("encode_trace_pickled", False, FUTURE, ""),
    ],
)
def test_dataclasses_mean_the_same_where_their_module_is_not_there(
    codec: str, in_script: bool, future: str, quote: str, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    classes = CLASSES.format(future=future, quote=quote).strip()
    (here / "classes_of_mine.py").write_text(classes)
    script = f"{classes if in_script else 'from classes_of_mine import *'}\n{USING_CLASSES}"
    (here / "script.py").write_text(script.replace("encode_trace", codec))
    worker = WORKER.replace("decode_trace", codec.replace("encode", "decode"))
    worker = worker.replace("try:", "failure = None\ntry:")
    worker += "assert sys.modules.get('classes_of_mine') is None\n"
    answer = decode(python(there, "-c", worker, given=python(here, "script.py")))
    assert answer["failure"] is None
    assert answer["results"] == [4, 5, 12, 10, 0, FIELDS, [*FIELDS, ("name", False, False)]]
