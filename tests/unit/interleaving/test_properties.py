"""Properties of any object that the model's side provides with values: waiting, views, transforms, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator

if TYPE_CHECKING:
    from tests.unit.interleaving.conftest import Scene


class Holder:
    """Something with values, as a model's own part or a tracer is."""

    def __init__(self, interleaver: Interleaver, path: str | None) -> None:
        self.interleaver = interleaver
        self.path = path
        self.prepared: list[str] = []

    @eproperty()
    def plain(self) -> Any:
        """A value."""

    @eproperty(key="numbers")
    def copied(self) -> Any:
        """A copy of the numbers, whose edits reach the model."""

    @copied.preprocess
    def _copied(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @copied.transform
    @staticmethod
    def _back(value: torch.Tensor) -> torch.Tensor:
        return value

    @eproperty(iterate=False)
    def once(self) -> Any:
        """A value that comes once."""

    @eproperty()
    def prepares(self) -> Any:
        self.prepared.append("asked for")


def test_property_waits_for_what_its_holder_is_provided_with(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.append(holder.plain)
        holder.plain = "replaced"
        mediator.iteration = 1
        scene.log.append(holder.plain)

    def model() -> list[Any]:
        return [Holder.plain.provide(holder, number) for number in range(3)]

    assert scene.run(model) == ["replaced", 1, 2]
    assert scene.log == [0, 1]


def test_property_of_a_holder_without_a_path_is_known_by_its_key(scene: Scene) -> None:
    holder = Holder(scene.interleaver, None)
    assert Holder.plain.provider(holder) == "plain"
    assert Holder.copied.provider(Holder(scene.interleaver, "part")) == "part.numbers"


@pytest.mark.parametrize("then", ["ends", "asks for more", "swaps another"])
def test_transform_takes_edits_of_a_copy_to_the_model_when_the_block_goes_on(scene: Scene, then: str) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.block
    def block(mediator: Mediator) -> None:
        holder.copied[0] = 7
        if then == "asks for more":
            mediator.request("other.i0")
        elif then == "swaps another":
            mediator.swap("other.i0", 1)

    left = scene.provide(("part.numbers", torch.ones(2)), ("other", 0))[0]
    assert left.tolist() == [7.0, 1.0]


def test_transform_of_an_invoke_replaces_its_rows_only(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.rows(0, 1)
    def first(mediator: Mediator) -> None:
        holder.copied[:] = 7

    @scene.rows(1, 2)
    def second(mediator: Mediator) -> None:
        scene.log.append(holder.copied.shape)

    left = scene.provide(("part.numbers", torch.zeros(3, 1)))[0]
    assert left.tolist() == [[7.0], [0.0], [0.0]]
    assert scene.log == [(2, 1)]


def test_stub_runs_before_each_request(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.append(holder.prepares)
        holder.prepares = 3

    assert scene.provide(("part.prepares", 2)) == [3]
    assert scene.log == [2]
    assert holder.prepared == ["asked for"] * 2


def test_value_that_comes_once_has_no_number(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.block
    def block(mediator: Mediator) -> None:
        mediator.request("a.i2")
        scene.log.append(holder.once)

    def model() -> Any:
        for number in range(3):
            scene.interleaver.handle("a", number, iterate=True)
        return Holder.once.provide(holder, "at last")

    assert scene.run(model) == "at last"
    assert scene.log == ["at last"]


def test_property_outside_a_run_is_an_error_that_names_it(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")
    with pytest.raises(ValueError, match="plain of Holder that is not interleaving"):
        _ = holder.plain
    with pytest.raises(ValueError, match="Cannot set plain of Holder that is not interleaving"):
        holder.plain = 1


def test_property_read_by_the_models_own_code_is_an_error(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    def model() -> None:
        with pytest.raises(ValueError, match="not interleaving"):
            _ = holder.plain

    scene.run(model)
