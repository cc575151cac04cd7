"""One block beside a run: what it may ask for, when it is too late, and how its waiting ends."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from greenlet import greenlet

from nnsight_engine.interleaving.events import Cancelation, MissedProviderError, OutOfOrderError
from nnsight_engine.interleaving.mediator import Mediator, named, split

if TYPE_CHECKING:
    from tests.unit.interleaving.conftest import Scene

# Names.


@pytest.mark.parametrize(
    ("requester", "parts"),
    [
        ("model.layers.3.output.i0", ("model.layers.3.output", 0)),
        ("model.layers.3.output.i12", ("model.layers.3.output", 12)),
        ("result", ("result", None)),
        ("model.layers.3.input", ("model.layers.3.input", None)),
        ("model.ii.i1", ("model.ii", 1)),
        ("model.i1.output", ("model.i1.output", None)),
        ("model.output.i", ("model.output.i", None)),
        ("model.output.i-1", ("model.output.i-1", None)),
    ],
)
def test_requester_is_a_provider_and_a_call_number(requester: str, parts: tuple[str, int | None]) -> None:
    assert split(requester) == parts
    assert named(*parts) == requester


# Asking.


def test_one_value_can_be_asked_for_again_and_again(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.extend(mediator.request("a.i0") for _ in range(5))
        mediator.swap("a.i0", "two")
        scene.log.append(mediator.request("a.i0"))

    assert scene.provide(("a", "one")) == ["two"]
    assert scene.log == ["one"] * 5 + ["two"]


def test_value_without_a_call_number_is_a_provider_of_its_own(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.append(mediator.request("result"))
        mediator.swap("result", "replaced")

    assert scene.run(lambda: "made") == "replaced"
    assert scene.log == ["made"]


# Too late, or never.


def test_value_that_was_passed_is_out_of_order(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        mediator.request("b.i0")
        with pytest.raises(OutOfOrderError, match=r"Value was missed for a\.i0"):
            mediator.request("a.i0")
        with pytest.raises(OutOfOrderError):
            mediator.swap("a.i0", 1)
        scene.log.append(mediator.request("c.i0"))

    scene.provide(("a", 1), ("b", 2), ("c", 3))
    assert scene.log == [3]


def test_call_number_that_is_too_high_is_missed_and_says_how_many_there_were(scene: Scene) -> None:
    scene.block(lambda mediator: mediator.request("a.i5"))
    with pytest.raises(MissedProviderError, match=r"a\.i5.*reached 2 times"):
        scene.provide(("a", 1), ("a", 2))


def test_block_may_catch_a_missed_value_and_ask_for_the_result(scene: Scene) -> None:
    """The run is over for good: whatever else is asked for is missed as well."""

    @scene.block
    def block(mediator: Mediator) -> None:
        for requester in ("nowhere.i0", "a.i7", "b.i0"):
            with pytest.raises(MissedProviderError):
                mediator.request(requester)
        scene.log.append("done")

    scene.provide(("a", 1))
    assert scene.log == ["done"]


def test_error_types_are_found_on_the_mediator() -> None:
    assert Mediator.OutOfOrderError is OutOfOrderError
    assert Mediator.MissedProviderError is MissedProviderError
    assert issubclass(OutOfOrderError, MissedProviderError)


# The end of a run that leaves a block waiting.


def failing_model(scene: Scene) -> None:
    with pytest.raises(ZeroDivisionError):
        scene.run(lambda: scene.interleaver.handle("a", 1, iterate=True) / 0)


def test_block_that_waits_when_the_model_fails_is_cancelled(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        try:
            mediator.request("b.i0")
        except Cancelation:
            scene.log.append("cancelled")
            raise
        finally:
            scene.log.append("cleaned up")

    failing_model(scene)
    assert scene.log == ["cancelled", "cleaned up"]
    assert not scene.mediators[0].alive


@pytest.mark.parametrize("swallowed", [Exception, BaseException])
@pytest.mark.parametrize(
    "run", [failing_model, lambda scene: scene.provide(("a", 1))], ids=["failed", "over"]
)
def test_block_that_asks_again_for_ever_does_not_hang_a_run_that_has_ended(
    scene: Scene, run: Any, swallowed: type[BaseException]
) -> None:
    """Nothing can end it from outside, since its stack must unwind by itself; it may be left behind."""
    rounds = 0

    @scene.block
    def block(mediator: Mediator) -> None:
        nonlocal rounds
        while rounds < 100_000:
            try:
                mediator.request("never.i0")
            except swallowed:
                rounds += 1

    with contextlib.suppress(MissedProviderError):
        run(scene)
    assert 0 < rounds < 1000
    assert not scene.mediators[0].alive or swallowed is BaseException


def test_cancelled_block_that_raises_something_else_does_not_hide_the_models_error(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        try:
            mediator.request("b.i0")
        finally:
            raise KeyError("while cleaning up")

    failing_model(scene)


def test_context_managers_of_a_cancelled_block_are_left(scene: Scene) -> None:
    lock = threading.Lock()

    @scene.block
    def block(mediator: Mediator) -> None:
        with lock, torch.no_grad():
            mediator.request("b.i0")

    failing_model(scene)
    assert not lock.locked()
    assert torch.is_grad_enabled()


# Code that is not the block's own.


def test_thread_of_a_block_cannot_ask(scene: Scene) -> None:
    errors: list[BaseException] = []

    @scene.block
    def block(mediator: Mediator) -> None:
        def elsewhere() -> None:
            try:
                mediator.request("a.i0")
            except ValueError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        scene.log.append(mediator.request("a.i0"))

    scene.provide(("a", 1))
    assert scene.log == [1]
    assert "another thread" in str(errors[0])


def test_greenlet_of_a_block_cannot_ask(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        with pytest.raises(ValueError, match=r"Cannot request `a\.i0`"):
            greenlet(lambda: mediator.request("a.i0")).switch()
        scene.log.append(mediator.request("a.i0"))

    scene.provide(("a", 1))
    assert scene.log == [1]


# Grad mode and torch's other switches belong to each side.


def modes() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def test_trace_opened_without_gradients_has_none_in_its_blocks(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.append(torch.is_grad_enabled())
        with torch.enable_grad():
            mediator.request("a.i0")
            scene.log.append(torch.is_grad_enabled())

    with torch.no_grad():
        scene.provide(("a", 1))
        scene.log.append(torch.is_grad_enabled())
    assert scene.log == [False, True, False]


def test_grad_mode_is_restored_when_a_block_fails(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        torch.set_grad_enabled(mode=False)
        mediator.request("a.i0")
        raise KeyError("block")

    with pytest.raises(KeyError):
        scene.provide(("a", 1))
    assert torch.is_grad_enabled()


entered = pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)


@entered
def test_what_a_block_has_entered_while_it_waits_is_not_the_models(scene: Scene, mode: Any) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        with mode():
            before = modes()
            mediator.request("a.i0")
            mediator.request("b.i0")
            assert modes() == before
        mediator.request("c.i0")
        assert modes() == plain

    plain = modes()

    def model() -> None:
        for name in "abc":
            scene.log.append(modes())
            scene.interleaver.handle(name, 0, iterate=True)
            scene.log.append(modes())

    scene.run(model)
    assert scene.log == [plain] * 6
    assert modes() == plain


@entered
def test_what_the_model_has_entered_is_not_the_blocks(scene: Scene, mode: Any) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        for name in "abc":
            mediator.request(f"{name}.i0")
            assert modes() == plain

    plain = modes()

    def model() -> None:
        scene.interleaver.handle("a", 0, iterate=True)
        with mode():
            inside = modes()
            scene.interleaver.handle("b", 0, iterate=True)
            assert modes() == inside
        assert modes() == plain
        scene.interleaver.handle("c", 0, iterate=True)

    scene.run(model)
    assert modes() == plain


# Without a run.


def test_mediator_that_has_not_started_is_not_alive_and_can_be_cancelled() -> None:
    mediator = Mediator(lambda: None)
    mediator.cancel()
    assert not mediator.alive
