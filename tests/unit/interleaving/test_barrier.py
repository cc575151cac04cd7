"""Barriers hold invokes until all have come; then they go on in the order in which they were defined."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from nnsight_engine.interleaving.events import MissedProviderError
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.interleaving.shared_variables import Barrier

if TYPE_CHECKING:
    from tests.unit.interleaving.conftest import Scene


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(3))))
def test_three_participants_go_on_in_order_of_definition_however_they_come(
    scene: Scene, arrival: tuple[int, ...]
) -> None:
    barrier = Barrier(scene.interleaver, 3)

    def block_for(place: int) -> None:
        @scene.block
        def block(mediator: Mediator) -> None:
            mediator.request(f"{arrival[place]}.i0")
            scene.log.append(f"{place} comes")
            barrier()
            scene.log.append(f"{place} goes")

    for place in range(3):
        block_for(place)
    scene.provide(*[(str(number), None) for number in range(3)])
    came = sorted(range(3), key=lambda place: arrival[place])
    assert scene.log == [*(f"{place} comes" for place in came), *(f"{place} goes" for place in range(3))]


def test_barriers_are_apart_from_each_other(scene: Scene) -> None:
    first, second = Barrier(scene.interleaver, 2), Barrier(scene.interleaver, 2)

    @scene.block
    def one(mediator: Mediator) -> None:
        first()
        scene.log.append("one")

    @scene.block
    def two(mediator: Mediator) -> None:
        second()
        scene.log.append("two")

    @scene.block
    def three(mediator: Mediator) -> None:
        second()
        scene.log.append("three")
        first()

    scene.run(lambda: None)
    assert scene.log == ["two", "three", "one"]


def test_barrier_for_fewer_than_come_leaves_the_last_waiting(scene: Scene) -> None:
    barrier = Barrier(scene.interleaver, 2)
    for _ in range(3):
        scene.block(lambda mediator: barrier())
    with pytest.raises(MissedProviderError, match="barrier for 2 participants was reached by 1 only"):
        scene.run(lambda: None)


def test_a_barrier_for_one_does_not_wait(scene: Scene) -> None:
    barrier = Barrier(scene.interleaver, 1)

    @scene.block
    def block(mediator: Mediator) -> None:
        barrier()
        barrier()
        scene.log.append(mediator.request("a.i0"))

    scene.provide(("a", 1))
    assert scene.log == [1]


def test_value_that_passed_while_an_invoke_was_held_is_out_of_order(scene: Scene) -> None:
    barrier = Barrier(scene.interleaver, 2)

    @scene.block
    def early(mediator: Mediator) -> None:
        barrier()
        mediator.request("a.i0")

    @scene.block
    def late(mediator: Mediator) -> None:
        mediator.request("b.i0")
        barrier()

    with pytest.raises(MissedProviderError, match=r"Value was missed for a\.i0"):
        scene.provide(("a", 1), ("b", 2))


def test_barrier_outside_an_invoke_is_refused(scene: Scene) -> None:
    barrier = Barrier(scene.interleaver, 2)
    with pytest.raises(ValueError, match="inside an invoke"):
        barrier()


@pytest.mark.parametrize("number", [0, -1])
def test_a_barrier_for_none_is_refused(scene: Scene, number: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 participant, got {number}"):
        Barrier(scene.interleaver, number)
