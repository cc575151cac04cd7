"""A block behaves as the code it is written as: its variables, its scopes, the statements around it."""

from __future__ import annotations

import builtins
import contextlib
import linecache
from collections.abc import Iterator
from typing import Any

import pytest

from nnsight_engine.core.saves import save
from nnsight_engine.tracing.source_text import WithBlockNotFoundError
from nnsight_engine.tracing.tracer import SITES, Tracer

GLOBAL: Any = 1


class Holder:
    """Something to bind an attribute of."""

    tracer: Any = None


@contextlib.contextmanager
def noted(into: list[str], name: str) -> Iterator[str]:
    into.append(f"enter {name}")
    yield name
    into.append(f"leave {name}")


def test_saved_variables_come_home_and_others_do_not() -> None:
    kept: Any = "before"
    dropped: Any = "before"
    with Tracer():
        kept = save([1])
        dropped = [2]
    assert kept == [1]
    assert dropped == "before"


def test_a_block_sees_what_was_assigned_before_it_and_what_as_binds() -> None:
    start = 20
    with Tracer() as tracer:
        seen = save([start + 1, tracer])
    assert seen == [21, tracer]


def test_a_list_with_a_saved_value_comes_home() -> None:
    with Tracer():
        results = [save(object()) for _ in range(3)]
        nested = {"a": (results[0],)}
    assert len(results) == 3
    assert nested["a"][0] is results[0]


def test_assignments_may_be_annotated() -> None:
    with Tracer():
        value: list[int] = save([1])
        later: int
        later = value[0]
        other = save([later])
    assert (value, other) == ([1], [1])


def test_comprehensions_lambdas_and_functions_share_the_blocks_variables() -> None:
    factor = 3
    with Tracer():
        offset = 1
        values = [factor * i + offset for i in range(3)]

        def shifted(value: int) -> int:
            nonlocal offset
            offset = 10
            return value + offset

        result = save([values, (lambda: offset)(), shifted(1), offset])
    assert result == [[1, 4, 7], 1, 11, 10]


def test_a_site_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, real = list[Any](), compile

    def counted(*args: Any, **kwargs: Any) -> Any:
        compiled.append(args)
        return real(*args, **kwargs)

    def site() -> list[int]:
        with Tracer():
            value = save([1])
        return value

    monkeypatch.setattr(builtins, "compile", counted)
    site()
    before = len(compiled)
    assert before > 0
    for _ in range(5):
        site()
    assert len(compiled) == before
    SITES.clear()
    assert site() == [1]
    assert len(compiled) > before


def test_global_and_nonlocal_are_bound_where_they_are_declared() -> None:
    value: Any = None

    def inner() -> None:
        global GLOBAL  # noqa: PLW0603 - what the test is about
        nonlocal value
        with Tracer():
            GLOBAL = save([7])
            value = save([8])

    inner()
    assert GLOBAL == [7]
    assert value == [8]


def test_private_names_and_super_mean_what_they_mean_in_the_class() -> None:
    class Base:
        def hello(self) -> str:
            return "base"

    class Child(Base):
        def __init__(self) -> None:
            self.__secret = "secret"

        def hello(self) -> str:
            __local = "local"
            with Tracer():
                found = save([self.__secret, __local, super().hello()])
            return " ".join(found)

    assert Child().hello() == "secret local base"


def test_a_class_body_and_exec_have_variables_too() -> None:
    class Body:
        start = 1
        with Tracer():
            value = save([start + 1])

    assert Body.value == [2]


def test_attributes_and_tuples_after_as_are_bound() -> None:
    holder = Holder()
    with Tracer() as holder.tracer:
        value = save([holder.tracer])
    assert value == [holder.tracer]
    assert isinstance(holder.tracer, Tracer)


def test_contexts_before_run_around_and_contexts_after_run_in_the_block() -> None:
    order: list[str] = []
    with noted(order, "outer"), Tracer(), noted(order, "inner"):
        order.append("block")
    assert order == ["enter outer", "enter inner", "block", "leave inner", "leave outer"]


def test_a_with_over_several_lines() -> None:
    order: list[str] = []
    with (
        noted(order, "outer") as outer,
        Tracer(
            backend=None,
        ) as tracer,
        noted(order, "inner") as inner,
    ):
        value = save([outer, inner, tracer])
    assert value == ["outer", "inner", tracer]


def test_a_block_on_the_line_of_its_with() -> None:
    with Tracer() as tracer: value = save([tracer]); other = save([2])  # fmt: skip # noqa: E701, E702
    assert value == [tracer]
    assert other == [2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_begins_with_try(fails: bool) -> None:
    with Tracer() as tracer:
        try:
            if fails:
                raise KeyError
            value = save([tracer])
        except KeyError:
            value = save(["caught"])
        finally:
            ended = save([True])
    assert value == (["caught"] if fails else [tracer])
    assert ended == [True]


def test_empty_blocks() -> None:
    with Tracer() as tracer:
        pass
    with Tracer():
        """Nothing but words."""
    with Tracer():
        ...
    assert tracer.info.source == ["        pass"]


def test_loops_and_conditions_around_and_inside() -> None:
    found = []
    for number in range(4):
        if number % 2:
            with Tracer():
                inside = save([*map(str, range(number))])
                for i in range(10):
                    if i == 2:
                        break
                else:
                    inside.append("never")
        else:
            continue
        found.append((inside, number))
    assert found == [(["0"], 1), (["0", "1", "2"], 3)]


def test_a_tracer_may_be_made_before_it_is_entered() -> None:
    tracer = Tracer()
    with tracer:
        value = save([1])
    assert value == [1]


@pytest.mark.parametrize(
    "statement", ["return 1", "yield 1", "await x", "async with x: pass", "[i async for i in x]"]
)
def test_statements_that_would_leave_the_block_are_refused(statement: str) -> None:
    text = f"async def f(Tracer, x):\n    with Tracer():\n        {statement}\n"
    if "yield" in statement or "return" in statement:
        text = text.replace("async def", "def")
    filename = f"<leaving {statement}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), namespace)
    with pytest.raises(SyntaxError, match="is not allowed in a traced block"):
        running = namespace["f"](Tracer, None)
        if hasattr(running, "send"):
            running.send(None)


def test_code_without_source_says_how_to_register_it() -> None:
    with pytest.raises(WithBlockNotFoundError, match=r"linecache\.cache"):
        exec(compile("with Tracer():\n    x = 1\n", "<made up>", "exec"), {"Tracer": Tracer})


def test_a_source_that_changed_is_noticed() -> None:
    filename, text = "<changed>", "\n\nwith Tracer():\n    x = 1\n"
    code = compile(text, filename, "exec")
    other = "a = 1\nb = 2\nc = 3\nd = 4\n"
    linecache.cache[filename] = (len(other), None, other.splitlines(keepends=True), filename)
    with pytest.raises(WithBlockNotFoundError, match=r"(?s)With block not found at line 3.*c = 3  <--- HERE"):
        exec(code, {"Tracer": Tracer})


def test_entering_by_a_call_is_refused() -> None:
    with contextlib.ExitStack() as stack, pytest.raises(WithBlockNotFoundError, match="ExitStack"):
        stack.enter_context(Tracer())
