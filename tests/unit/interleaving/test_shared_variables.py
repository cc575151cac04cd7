"""Invokes run side by side, and their variables behave as if they ran one after the other."""

from __future__ import annotations

import ast
import sys
from types import CellType
from typing import Any

import pytest
import torch

from nnsight_engine import save
from nnsight_engine.core.closure_cells import Assignments
from nnsight_engine.tracing.block_names import stored_in
from nnsight_engine.tracing.counted_stores import OWN, count_stores
from tests.shared_names import Program
from tests.small_models import Rows


@pytest.fixture
def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).requires_grad_(False)


@pytest.fixture
def model(net: torch.nn.Sequential) -> Rows:
    return Rows(net)


X = torch.tensor([[1.0, 2.0, 3.0]])


def test_an_earlier_invoke_sees_a_later_ones_variable_after_a_barrier(model: Rows, net: Any) -> None:
    hidden: Any
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            barrier()
            model[1].input = hidden  # noqa: F821 - assigned by the invoke below, which comes to the barrier
            patched = save(model.output)
        with tracer.invoke(5 * X):
            hidden = model[0].output.clone()
            barrier()
    torch.testing.assert_close(patched, net(5 * X))


def test_the_surrounding_code_gets_what_the_last_invoke_assigned(model: Rows, net: Any) -> None:
    with model.trace() as tracer:
        with tracer.invoke(X):
            _ = model[1].output
            result = save(model.output)  # assigned last in time
        with tracer.invoke(2 * X):
            result = save(model[0].output)  # assigned last as written
    torch.testing.assert_close(result, net[0](2 * X))


def test_a_variable_read_too_early_is_a_name_error_that_mentions_barriers(model: Rows) -> None:
    with pytest.raises(NameError, match="later_on") as caught, model.trace() as tracer:
        with tracer.invoke(X):
            later_on = model[0].output
        with tracer.invoke(X):
            model[0].output = later_on
    assert "tracer.barrier(2)" in caught.value.__notes__[0]


def test_a_value_left_over_is_never_taken_for_one_that_comes_later(model: Rows) -> None:
    clean = torch.zeros(1, 4)
    with pytest.raises(NameError, match="clean") as caught, model.trace() as tracer:
        with tracer.invoke(X):
            clean = model[0].output
        with tracer.invoke(X):
            model[0].output = clean
    assert "a value from before the trace is not used instead" in caught.value.__notes__[0]


@pytest.mark.parametrize("first", [True, False], ids=["assigned in the first", "assigned in the second"])
def test_a_value_left_over_gives_way_at_a_barrier(model: Rows, net: Any, *, first: bool) -> None:
    clean = torch.zeros(1, 4)
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        for is_source in (first, not first):
            if is_source:
                with tracer.invoke(5 * X):
                    clean = model[0].output
                    barrier()
            else:
                with tracer.invoke(X):
                    barrier()
                    model[1].input = clean
                    patched = save(model.output)
    torch.testing.assert_close(patched, net(5 * X))


def test_pairs_of_invokes_that_meet_have_each_other_s_values(model: Rows, net: Any) -> None:
    hidden: Any
    with model.trace() as tracer:
        found = save([])
        for factor in (2, 3):
            barrier = tracer.barrier(2)
            with tracer.invoke(X):
                barrier()
                model[1].input = hidden  # noqa: F821 - assigned by the one that it meets
                found.append(model.output)
            with tracer.invoke(factor * X):
                hidden = model[0].output.clone()
                barrier()
    torch.testing.assert_close(found[0], net(2 * X))
    torch.testing.assert_close(found[1], net(3 * X))


def test_the_surrounding_value_counts_where_no_invoke_before_has_assigned(model: Rows) -> None:
    scale = 3
    with model.trace() as tracer:
        with tracer.invoke(X):
            before = save([scale])
            if scale == 4:
                scale = 5
        with tracer.invoke(X):
            _ = model[0].output  # the first invoke has ended by now
            after = save([scale])
            scale = 6
    assert (before, after) == ([3], [3])


def test_an_invoke_that_did_not_assign_leaves_what_another_has(model: Rows) -> None:
    result: Any = "left over"
    with model.trace() as tracer:
        for is_wanted in (True, False):
            with tracer.invoke(X):
                output = model[0].output
                if is_wanted:
                    result = save(output)
    assert result.shape == (1, 4)


def test_names_assigned_in_what_a_definition_computes_at_once_are_the_codes_around(model: Rows) -> None:
    with model.trace() as tracer:
        seen = save([])
        for turn in range(2):
            _ = lambda one=(first := turn): one  # noqa: E731 - a lambda is what it is about

            def two(one: int = (second := 10 * turn)) -> int:
                return one

            class Three(third := (int, str)[turn]): ...  # type: ignore[misc] # a class known late

            with tracer.invoke(X):
                _ = model[0].output
                first, second = first + 1, second + 1
                third = (third,)  # type: ignore[has-type]  # noqa: F821 - assigned among the bases
                _ = model[1].output
                seen.append((first, second, third))
    assert seen == [(1, 1, (int,)), (2, 11, (str,))]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no type aliases")
def test_a_type_alias_is_an_assignment() -> None:
    body = ast.parse("type X = int\ntype Y[T] = list[T]").body
    assert stored_in(body) == {"X", "Y"}
    module = ast.Module(body=count_stores(body, stored_in(body), str), type_ignores=[])
    cells = {name: CellType() for name in ("X", "Y")}
    assignments = Assignments(cells)
    exec(compile(ast.fix_missing_locations(module), "aliases", "exec"), {OWN: assignments})
    assert (assignments["X"], assignments["Y"], assignments.total) == (1, 1, 2)


def test_random_programs_read_what_they_would_if_their_invokes_ran_one_by_one() -> None:
    model = Rows(torch.nn.Sequential(*(torch.nn.Identity() for _ in range(6))))
    given, num_programs, num_passed_on = torch.ones(1, 2), 80, 0
    for seed in range(num_programs):
        program = Program(seed)
        num_passed_on += program.check(program.traced(model, given))
    assert num_passed_on > num_programs / 2  # an error everywhere would be right, and of no use
