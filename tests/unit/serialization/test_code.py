"""Functions, classes and modules arrive as they were written, whether the other side has them or not."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.serialization import (
    TRUSTED,
    EncodeError,
    MessageLimits,
    decode,
    encode,
    encode_error,
    register_by_value,
    restore_error,
    unregister_by_value,
)
from nnsight_engine.serialization.source.received_code import SOURCE_CACHE

SCALE = 3
NOTES: list[str] = []


def sent(value: Any) -> Any:
    return decode(encode(value), policy=TRUSTED)


def scaled(value: float, *, by: float = 2.0) -> float:
    """Scale."""
    return value * by * SCALE


def even(number: int) -> bool:
    return number == 0 or odd(number - 1)


def odd(number: int) -> bool:
    return number != 0 and even(number - 1)


def note(text: str) -> None:
    NOTES.append(text)


def notes() -> list[str]:
    return NOTES


def failing(value: int) -> float:
    return 1 / value


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        note(function.__name__)
        return function(*args)

    return wrapper


@logged
def doubled(value: int) -> int:
    return value * 2


@functools.lru_cache
def fibonacci(number: int) -> int:
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


class Base:
    def describe(self) -> str:
        return "base"


class Derived(Base):
    count: Any = 0
    __hidden = "hidden"

    def describe(self) -> str:
        return f"{super().describe()} {self.__hidden} {self.shout('x')}"

    @staticmethod
    def shout(text: str) -> str:
        return text.upper()

    @classmethod
    def make(cls) -> Derived:
        return cls()

    @property
    def twice(self) -> float:
        return scaled(1)

    class Inner:
        value = 5


@dataclasses.dataclass(order=True)
class Record:
    name: str
    values: list[int] = dataclasses.field(default_factory=lambda: [SCALE])


class Colour(enum.Enum):
    RED = enum.auto()
    BLUE = enum.auto()

    def other(self) -> Colour:
        return Colour.BLUE if self is Colour.RED else Colour.RED


class Probe(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scaled_rows: torch.Tensor = self.inner(rows) * SCALE
        return scaled_rows


def local_class(base: type, step: int) -> Any:
    class Local(base):
        def advance(self) -> Any:
            return Local, step

    return Local


def countdown_of(step: int) -> Any:
    def countdown(number: int) -> list[int]:
        return [number, *countdown(number - step)] if number > 0 else []

    return countdown


first, second, outer = (lambda x: x + 1), (lambda x: x + 2), (lambda: lambda y=1: y + SCALE)
SAME: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "defaults and globals": (scaled, lambda f: [f(1), f(1, by=1), f.__name__]),
    "functions that call each other": (even, lambda f: [f(10), f(7)]),
    "lambdas on one line": ([second, outer, first], lambda fs: [fs[0](0), fs[1]()(2), fs[2](0)]),
    "a lambda of a lambda": (outer(), lambda f: f()),
    "a recursive closure": (countdown_of(2), lambda f: f(5)),
    "decorated": (doubled, lambda f: f.__wrapped__(1)),
    "cached": (fibonacci, lambda f: f(20)),
    "partial": (functools.partial(scaled, by=1), lambda f: f(2)),
    "decorated by torch": (torch.no_grad()(scaled), lambda f: f(1)),
    "class": (Derived, lambda kind: [kind.make().describe(), kind().twice, kind.Inner.value]),
    "names of a class": (Derived, lambda kind: [kind.__mro__[1].__name__, kind.describe.__qualname__]),
    "bound method": (Derived().describe, lambda f: f()),
    "method": (Derived.describe, lambda f: f.__name__),
    "objects of one class": ([Derived(), Derived()], lambda pair: type(pair[0]) is type(pair[1])),
    "inner class": (Derived.Inner(), lambda one: one.value),
    "dataclass": (Record("a"), lambda one: [one.values, one < type(one)("b")]),
    "enum": (Colour.RED, lambda one: one.other() is type(one).BLUE),
    "module": (Probe(), lambda one: one(torch.zeros(1, 2)).tolist()),
    "class made in a function": (
        local_class(Base, 4),
        lambda kind: [kind().advance()[0] is kind, kind().advance()[1], kind().describe()],
    ),
}
"""By what it is, what is sent, and what is looked at here and there."""


@pytest.mark.parametrize("name", SAME)
def test_what_is_sent_does_there_what_it_does_here(name: str) -> None:
    value, look = SAME[name]
    arrived = sent(value)
    assert arrived is not value
    assert look(arrived) == look(value)


def test_functions_that_call_each_other_and_share_globals_still_do() -> None:
    there_even, there_note, there_notes = sent([even, note, notes])
    assert there_even(10)
    assert not there_even(7)
    there_note("there")
    assert there_notes() == ["there"]
    assert NOTES == []


def test_closures_share_their_cells() -> None:
    count = 0

    def increase() -> int:
        nonlocal count
        count += 1
        return count

    def current() -> int:
        return count

    there_increase, there_current = sent((increase, current))
    there_increase()
    there_increase()
    assert there_current() == 2
    assert current() == 0


def test_an_unbound_variable_stays_unbound() -> None:
    def unbound() -> Any:
        return later

    with pytest.raises(NameError, match="later"):
        sent(unbound)()
    later = 1


def test_data_of_a_class_that_changed_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Derived, "count", 7)
    assert sent(Derived).count == 7


def test_a_class_body_that_needs_a_gone_variable_is_refused() -> None:
    def make(step: int) -> Any:
        class Local:
            size = step

        return Local

    with pytest.raises(EncodeError, match="`step` of the function around it"):
        encode(make(1))


def test_tracebacks_and_inspect_show_the_senders_lines() -> None:
    arrived = sent(failing)
    assert inspect.getsource(arrived) == inspect.getsource(failing)
    assert list(arrived.__code__.co_positions()) == list(failing.__code__.co_positions())
    with pytest.raises(ZeroDivisionError) as caught:
        arrived(0)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, "return 1 / value")


@pytest.fixture
def user_module(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module of the user's own, which the other side would not have."""
    path = tmp_path / "users_helpers.py"
    path.write_text(
        "import threading\nlock = threading.Lock()\nfactor = 10\n"
        "def times(x):\n    return x * factor\nclass Thing:\n    size = 2\n"
    )
    spec = importlib.util.spec_from_file_location("users_helpers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["users_helpers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["users_helpers"]


def test_a_custom_module_is_sent_as_far_as_code_mentions_it(user_module: types.ModuleType) -> None:
    def use() -> Any:
        return user_module.times(user_module.Thing().size), user_module

    del sys.modules["users_helpers"]  # so that nothing can be found by name
    try:
        sys.modules["users_helpers"] = user_module
        data = encode(use)
    finally:
        sys.modules["users_helpers"] = types.ModuleType("users_helpers")
    result, module = decode(data, policy=TRUSTED)()
    assert result == 20
    assert module is not user_module
    assert not hasattr(module, "lock")
    module.factor = 100
    assert module.times(1) == 100


def test_an_installed_module_can_be_sent_by_value() -> None:
    register_by_value("hypothesis.errors")
    try:
        from hypothesis.errors import Flaky  # noqa: PLC0415 - after it was registered

        assert sent(Flaky) is not Flaky
    finally:
        unregister_by_value("hypothesis.errors")
    assert sent(Flaky) is Flaky


def test_code_from_a_cell_has_its_text_in_linecache() -> None:
    text = "def cell_function(x):\n    return [y + x for y in range(2)]\n"
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(keepends=True), "<cell 1>")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<cell 1>", "exec"), namespace)
    data = encode(namespace["cell_function"])
    del linecache.cache["<cell 1>"]
    arrived = decode(data, policy=TRUSTED)
    assert arrived(5) == [5, 6]
    assert inspect.getsource(arrived) == text


def test_source_that_is_too_long_is_named() -> None:
    with pytest.raises(EncodeError, match=r"item \[0\] cannot be sent.*\(scaled\); its source is too long"):
        encode([scaled], limits=MessageLimits(max_text_bytes=10))


def test_code_without_a_text_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def lost(): pass", namespace)
    with pytest.raises(EncodeError, match=r"\(lost\).*was not found"):
        encode(namespace["lost"])


def test_the_path_to_what_cannot_travel_goes_through_globals_and_closures() -> None:
    handle = open(__file__)  # noqa: SIM115 - what the test is about

    def reader() -> str:
        return handle.read()

    with handle, pytest.raises(EncodeError, match=r"item \['f'\], variable `handle` cannot be sent"):
        encode({"f": reader})


BEFORE = "class Settings:\n    rate: float = 0.5\n    __hidden: int = 1\n    name = 'a'\n"


@pytest.mark.parametrize(
    ("after", "is_sent"),
    [
        (BEFORE, True),
        (BEFORE.replace("0.5", "0.7"), True),  # the value is sent as it is now
        (BEFORE.replace("rate", "speed"), False),
        (BEFORE + "    extra: int = 3\n", False),
        (BEFORE + "    extra = 3\n", False),
        (BEFORE + "    def method(self): return 1\n", False),
        (BEFORE.replace("    rate: float = 0.5\n", ""), False),
    ],
)
def test_a_class_whose_file_was_edited_is_not_sent_in_the_new_version(
    after: str, is_sent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "edited_settings.py"
    path.write_text(BEFORE)
    spec = importlib.util.spec_from_file_location("edited_settings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited_settings", module)
    spec.loader.exec_module(module)
    path.write_text(after)
    linecache.checkcache(str(path))
    if is_sent:
        assert (sent(module.Settings).rate, sent(module.Settings).name) == (0.5, "a")
    else:
        with pytest.raises(EncodeError, match="has changed since it was loaded"):
            encode(module.Settings)


def test_text_that_another_side_sent_is_not_taken_for_a_notebook_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server's error may carry any text under any file name, and would have its code sent to others."""
    module = types.ModuleType("notebook_of_ones_own")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("class Config:\n    size = 1\n", vars(module))
    entry = {"file": "a cell", "line": 1, "name": "f", "source": "class Config: size = print('ran')"}
    restore_error({**encode_error(ValueError("x")), "entries": [entry]})
    assert "a cell" in linecache.cache
    with pytest.raises(EncodeError, match="source was not found"):
        encode(module.Config)
    # Code that arrived, as that of a block in a session.
    SOURCE_CACHE.register("a cell", 1, "class Config: size = 1")
    restore_error({**encode_error(ValueError("x")), "entries": [entry]})
    assert sent(module.Config).size == 1
