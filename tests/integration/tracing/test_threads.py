"""Threads that trace at once, or one after the other, do not see each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from nnsight_engine import save
from nnsight_engine.core.saves import SAVES
from tests.integration.tracing.ways import WIDTH, RefusedError, Unmarked, X, network, num_greenlets, saves
from tests.small_models import Rows


def in_threads(*jobs: Callable[[], None]) -> None:
    """Run the jobs at once, and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a trace waits for ever"
    if errors:
        raise errors[0]


def test_threads_that_trace_two_models_do_not_see_each_others_values() -> None:
    """At each module both wait for each other, so that one is within a trace while the other ends."""
    modules = [network(1), network(2)]
    models = [Rows(module) for module in modules]
    together = threading.Barrier(2, timeout=30)

    def job(number: int) -> Callable[[], None]:
        model, module, row = models[number], modules[number], X * (number + 1)
        expected = [module[: layer + 1](row) for layer in range(4)]

        def work() -> None:
            for turn in range(30):
                with model.trace(row):
                    found = save([])
                    for layer in range(4):
                        together.wait()
                        found.append(model[layer].output)
                    unsaved = [1, 2]
                    if (turn + number) % 2:
                        together.wait()
                assert [bool(torch.equal(*pair)) for pair in zip(found, expected, strict=True)] == [True] * 4
                assert "unsaved" not in locals()
                assert not SAVES.depth
                if not (turn + number) % 2:
                    together.wait()

        return work

    in_threads(job(0), job(1))


def test_threads_that_trace_one_model_take_turns(model: Rows, module: torch.nn.Sequential) -> None:
    def job(scale: int) -> Callable[[], None]:
        row = X * scale
        expected = module(row)

        def work() -> None:
            for _ in range(40):
                with model.trace(row):
                    hidden = model[1].output
                    model[2].input = hidden * 1
                    out = model.output.save()
                assert torch.equal(out, expected)
                with pytest.raises(RefusedError), model.trace(row):
                    model[1].output.save()
                    raise RefusedError

        return work

    in_threads(*(job(scale) for scale in range(1, 4)))


def test_thread_that_calls_a_model_while_another_traces_it_gets_the_plain_output(
    model: Rows, module: torch.nn.Sequential, unmarked: Unmarked
) -> None:
    inside, called = threading.Event(), threading.Event()

    def traces() -> None:
        with model.trace(X):
            model[0].output = torch.zeros(1, WIDTH)
            inside.set()
            assert called.wait(30)
            out = model.output.save()
        assert not torch.equal(out, unmarked.output)

    def calls() -> None:
        assert inside.wait(30)
        try:
            assert torch.equal(module(X), unmarked.output)
        finally:
            called.set()

    in_threads(traces, calls)


def test_threads_that_trace_one_module_in_two_wrappings_leave_it_as_it_was(
    module: torch.nn.Sequential, unmarked: Unmarked
) -> None:
    """One begins, the other has to wait for it, and then has the module for itself."""
    first, second = Rows(module), Rows(module)
    first_inside, second_inside = threading.Event(), threading.Event()

    def begins() -> None:
        with first.trace(X):
            first[0].output.save()
            first_inside.set()
            assert not second_inside.wait(0.3)
            out = first.output.save()
        assert torch.equal(out, unmarked.output)

    def begins_within() -> None:
        assert first_inside.wait(30)
        with second.trace(X):
            second[0].output = torch.zeros(1, WIDTH)
            second_inside.set()
            second[2].output.save()
            out = second.output.save()
        assert not torch.equal(out, unmarked.output)

    in_threads(begins, begins_within)
    unmarked.check()
    for wrapped in (first, second):
        with wrapped.trace(X):
            out = wrapped.output.save()
        assert torch.equal(out, unmarked.output)


@pytest.mark.heavy
def test_many_threads_come_and_go(model: Rows) -> None:
    def several() -> None:
        in_threads(*[lambda: saves(model)] * 4)

    several()
    saves(model)
    before = num_greenlets()
    for _ in range(10):
        several()
        saves(model)
    assert num_greenlets() <= before + 4
