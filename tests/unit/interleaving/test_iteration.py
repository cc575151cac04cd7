"""Loops over steps: which come, where they end, and what asking in them means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nnsight_engine.core.errors import IterationOver
from nnsight_engine.envoys.tracers.steps import Iter, IteratorTracer, Steps
from nnsight_engine.interleaving.mediator import Mediator

if TYPE_CHECKING:
    from tests.unit.interleaving.conftest import Scene


def steps_of(scene: Scene, number: int) -> list[Any]:
    """Run a model of two places, ``a`` and ``b``, for so many steps; returns what became of ``b``."""
    interleaver = scene.interleaver

    def model() -> list[Any]:
        left = []
        for step in range(number):
            if step:
                interleaver.advance("a", step)
            interleaver.handle("a", f"a{step}", iterate=True)
            left.append(interleaver.handle("b", f"b{step}", iterate=True))
        return left

    return scene.run(model)  # type: ignore[no-any-return]


def numbered(scene: Scene, provider: str, mediator: Mediator) -> Any:
    """Ask as a property does: for the call that the loop is at."""
    return mediator.request(scene.interleaver.iterate_requester(provider))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (slice(None), [0, 1, 2, 3]),
        (slice(1, 3), [1, 2]),
        (slice(2, None), [2, 3]),
        (slice(None, None, 2), [0, 2]),
        (slice(1, 100, 2), [1, 3]),
        (slice(9, None), []),
        (slice(2, 2), []),
        (2, [2]),
        ([0, 3], [0, 3]),
        ((1, 2), [1, 2]),
        ([], []),
    ],
)
def test_loop_runs_for_the_steps_it_selects(scene: Scene, steps: Steps, expected: list[int]) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        for step in Iter(scene.interleaver)[steps]:
            scene.log.append((step, numbered(scene, "b", mediator)))

    steps_of(scene, 4)
    assert scene.log == [(step, f"b{step}") for step in expected]


def test_loop_in_a_loop(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        for outer in Iter(scene.interleaver)[0:4:2]:
            scene.log.append((outer, numbered(scene, "a", mediator)))
            for inner in Iter(scene.interleaver)[outer + 1]:
                scene.log.append((outer, inner, numbered(scene, "b", mediator)))

    steps_of(scene, 4)
    assert scene.log == [(0, "a0"), (0, 1, "b1"), (2, "a2"), (2, 3, "b3")]


def test_requests_after_a_loop_are_for_the_value_at_hand_and_what_comes_next(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        for _ in Iter(scene.interleaver)[0:2]:
            numbered(scene, "b", mediator)
        assert mediator.iteration is None
        scene.log.extend(numbered(scene, provider, mediator) for provider in "bab")

    steps_of(scene, 4)
    assert scene.log == ["b1", "a2", "b2"]


def test_loop_that_is_left_early_lets_the_block_go_on(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        for step in Iter(scene.interleaver)[:]:
            if step == 1:
                break
            numbered(scene, "b", mediator)
        scene.log.append(numbered(scene, "b", mediator))

    steps_of(scene, 3)
    assert scene.log == ["b1"]


def test_bodys_except_exception_does_not_keep_a_loop_alive(scene: Scene) -> None:
    assert not issubclass(IterationOver, Exception)

    @scene.block
    def block(mediator: Mediator) -> None:
        for step in Iter(scene.interleaver)[:]:
            try:
                scene.log.append(numbered(scene, "b", mediator))
            except Exception:  # noqa: BLE001 - the subject
                scene.log.append(f"caught in {step}")

    steps_of(scene, 3)
    assert scene.log == ["b0", "b1", "b2"]


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (-1, ValueError, "count from 0"),
        ([1, -1], ValueError, "count from 0"),
        ([2, 1], ValueError, "order"),
        ([1, 1], ValueError, "order"),
        (slice(-2, None), ValueError, "count from 0"),
        (slice(None, -1), ValueError, "count from 0"),
        (slice(None, None, -1), ValueError, "forward"),
        (slice(None, None, 0), ValueError, "forward"),
        ("ab", TypeError, "a number, a slice or a list"),
        ([1.0], TypeError, "a number, a slice or a list"),
    ],
)
def test_steps_that_cannot_be_are_refused_at_once(
    scene: Scene, steps: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Iter(scene.interleaver)[steps]


def test_steps_outside_a_block_are_refused(scene: Scene) -> None:
    with pytest.raises(ValueError, match="inside an invoke"):
        next(iter(IteratorTracer(slice(None), scene.interleaver)))


def test_the_clock_determines_which_calls_are_steps(scene: Scene) -> None:
    """A part that is called many times in a step does not make steps of its own."""
    interleaver = scene.interleaver

    @scene.block
    def block(mediator: Mediator) -> None:
        for step in Iter(interleaver)[:]:
            scene.log.append((step, mediator.request(f"whole.i{step}")))

    def model() -> None:
        interleaver.clock = "whole"
        for step in range(3):
            for call in range(4):
                interleaver.advance("part", 4 * step + call)
                interleaver.handle("part", None, iterate=True)
            if step:
                interleaver.advance("whole", step)
            interleaver.handle("whole", f"w{step}", iterate=True)
        interleaver.end_loops()

    scene.run(model)
    assert scene.log == [(0, "w0"), (1, "w1"), (2, "w2")]
