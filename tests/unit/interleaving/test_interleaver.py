"""The model's side: what it provides, to whom, in which order, and how it ends when something fails."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from nnsight_engine.interleaving.events import EarlyStopException, MissedProviderError, OutOfOrderError
from nnsight_engine.interleaving.mediator import Mediator

if TYPE_CHECKING:
    from tests.unit.interleaving.conftest import Scene

# Several blocks.


def test_blocks_are_answered_in_the_order_in_which_they_were_defined(scene: Scene) -> None:
    def block_for(name: str) -> None:
        @scene.block
        def block(mediator: Mediator) -> None:
            scene.log.append((name, mediator.request("a.i0")))
            mediator.swap("a.i0", name)

    for name in "xyz":
        block_for(name)
    assert scene.provide(("a", "model")) == ["z"]
    assert scene.log == [("x", "model"), ("y", "x"), ("z", "y")]


def test_block_defined_later_that_asks_first_is_still_answered_second(scene: Scene) -> None:
    """Order is that of definition at each value, whoever queued there sooner."""

    @scene.block
    def first(mediator: Mediator) -> None:
        mediator.request("a.i0")
        scene.log.append(("first", mediator.request("b.i0")))

    @scene.block
    def second(mediator: Mediator) -> None:
        scene.log.append(("second", mediator.request("b.i0")))

    scene.provide(("a", 1), ("b", 2))
    assert scene.log == [("first", 2), ("second", 2)]


# Errors, and stopping early.


def test_error_of_a_block_ends_the_model_and_comes_out(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        mediator.request("b.i0")
        raise KeyError("the block's")

    def model() -> None:
        for name in "abc":
            scene.interleaver.handle(name, 0, iterate=True)
            scene.log.append(name)

    with pytest.raises(KeyError, match="the block's") as caught:
        scene.run(model)
    assert scene.log == ["a"]
    assert caught.value.__context__ is None
    assert not scene.interleaver.interleaving


def test_error_of_one_block_cancels_the_others(scene: Scene) -> None:
    def waits(mediator: Mediator) -> None:
        try:
            mediator.request("z.i0")
        finally:
            scene.log.append("cancelled")

    scene.block(waits)

    @scene.block
    def fails(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise KeyError("one of three")

    scene.block(waits)
    with pytest.raises(KeyError, match="one of three"):
        scene.provide(("a", 0), ("z", 0))
    assert scene.log == ["cancelled"] * 2
    assert not any(mediator.alive for mediator in scene.mediators)


def test_first_of_several_errors_comes_out(scene: Scene) -> None:
    def fails_with(message: str) -> None:
        @scene.block
        def fails(mediator: Mediator) -> None:
            try:
                mediator.request("a.i0")
            finally:
                raise KeyError(message)

    fails_with("first")
    fails_with("second")
    with pytest.raises(KeyError, match="first"):
        scene.provide(("a", 0))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_that_are_no_exceptions_come_out_of_blocks(scene: Scene, kind: type[BaseException]) -> None:
    @scene.block
    def fails(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise kind

    with pytest.raises(kind):
        scene.provide(("a", 0))


@pytest.mark.parametrize("swallowed", [Exception, BaseException])
def test_model_that_swallows_errors_still_ends_in_the_blocks_error(
    scene: Scene, swallowed: type[BaseException]
) -> None:
    @scene.block
    def fails(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise KeyError("the block's")

    def model() -> str:
        with contextlib.suppress(swallowed):
            scene.interleaver.handle("a", 0, iterate=True)
        return "went on"

    with pytest.raises(KeyError, match="the block's"):
        scene.run(model)


def test_stopping_in_one_block_ends_the_others_where_they_wait(scene: Scene) -> None:
    @scene.block
    def waits(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0"))
        mediator.request("b.i0")
        scene.log.append("waited in vain")

    @scene.block
    def stops(mediator: Mediator) -> None:
        mediator.request("a.i0")
        mediator.stop()

    scene.provide(("a", 1), ("b", 2))
    assert scene.log == [1]
    assert not any(mediator.alive for mediator in scene.mediators)


@pytest.mark.parametrize("error", [EarlyStopException, KeyError])
def test_an_end_before_the_first_value_keeps_the_model_from_running(
    scene: Scene, error: type[Exception]
) -> None:
    @scene.block
    def ends(mediator: Mediator) -> None:
        raise error

    with contextlib.nullcontext() if error is EarlyStopException else pytest.raises(error):
        assert scene.run(lambda: scene.log.append("model")) is None
    assert scene.log == []


def test_error_in_one_block_and_a_stop_in_another_is_an_error(scene: Scene) -> None:
    @scene.block
    def stops(mediator: Mediator) -> None:
        try:
            mediator.request("b.i0")
        finally:
            mediator.stop()

    @scene.block
    def fails(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise KeyError("the block's")

    with pytest.raises(KeyError, match="the block's"):
        scene.provide(("a", 1), ("b", 2))


def test_interleaver_runs_again_after_any_end(scene: Scene) -> None:
    interleaver = scene.interleaver

    def stops(mediator: Mediator) -> None:
        mediator.stop()

    def fails(mediator: Mediator) -> None:
        raise KeyError

    def misses(mediator: Mediator) -> None:
        mediator.request("never.i0")

    def takes(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0"))

    def run(function: Any) -> Any:
        mediator = Mediator(lambda: function(mediator))
        interleaver.initialize([mediator])
        return interleaver.run(lambda: interleaver.handle("a", "value", iterate=True))

    for _ in range(3):
        run(stops)
        with pytest.raises(KeyError):
            run(fails)
        with pytest.raises(MissedProviderError):
            run(misses)
        assert run(takes) == "value"
    assert scene.log == ["value"] * 3
    assert not interleaver.interleaving
    assert interleaver.current is None
    assert not interleaver.wanted
    assert interleaver.batcher.current_value is None


# Providing.


def test_requester_gets_the_number_of_the_call_to_come(scene: Scene) -> None:
    interleaver = scene.interleaver

    def model() -> None:
        for number in range(3):
            assert interleaver.iterate_requester("a") == f"a.i{number}"
            interleaver.handle("a", 0, iterate=True)
        assert interleaver.iterate_requester("b") == "b.i0"

    scene.run(model)


def test_value_provided_while_another_is_handled_is_handled_within(scene: Scene) -> None:
    """As when a block of one place runs code that provides another: the outer value must survive."""

    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.append(mediator.request("outer.i0"))
        scene.log.append(scene.interleaver.handle("inner", "inner value", iterate=True))
        mediator.swap("outer.i0", "outer swapped")

    @scene.block
    def other(mediator: Mediator) -> None:
        scene.log.append(mediator.request("inner.i0"))
        mediator.swap("inner.i0", "inner swapped")

    assert scene.provide(("outer", "outer value")) == ["outer swapped"]
    assert scene.log == ["outer value", "inner value", "inner swapped"]


def test_block_that_makes_the_model_go_on_may_not_skip_its_own_turn(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        mediator.request("a.i0")
        with pytest.raises(OutOfOrderError):
            scene.interleaver.handle("b", 1, iterate=True)
            mediator.request("b.i0")

    scene.provide(("a", 0))
