"""The model's side: what it provides, to whom, in which order, and how it ends when something fails."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.interleaving.events import EarlyStopException, MissedProviderError, OutOfOrderError
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.modeling.base import NNsight

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


def test_block_may_use_what_an_earlier_one_read_at_an_earlier_place(scene: Scene) -> None:
    shared: dict[str, Any] = {}

    @scene.block
    def reads(mediator: Mediator) -> None:
        shared["a"] = mediator.request("a.i0")

    @scene.block
    def writes(mediator: Mediator) -> None:
        mediator.request("b.i0")
        mediator.swap("b.i0", shared["a"])

    assert scene.provide(("a", 1), ("b", 2)) == [1, 1]


def test_many_blocks_at_many_places(scene: Scene) -> None:
    places, blocks = 20, 30

    def block_for(number: int) -> None:
        @scene.block
        def block(mediator: Mediator) -> None:
            for place in range(number % 5, places, 1 + number % 3):
                value = mediator.request(f"{place}.i0")
                mediator.swap(f"{place}.i0", value + 1)

    for number in range(blocks):
        block_for(number)
    expected = [
        sum(place in range(number % 5, places, 1 + number % 3) for number in range(blocks))
        for place in range(places)
    ]
    assert scene.provide(*[(str(place), 0) for place in range(places)]) == expected


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


def test_error_before_the_first_value_keeps_the_model_from_running(scene: Scene) -> None:
    @scene.block
    def fails(mediator: Mediator) -> None:
        raise KeyError("at once")

    scene.block(lambda mediator: scene.log.append("second block"))
    with pytest.raises(KeyError, match="at once"):
        scene.run(lambda: scene.log.append("model"))
    assert "model" not in scene.log


def test_error_of_the_model_comes_out_as_it_is(scene: Scene) -> None:
    scene.block(lambda mediator: mediator.request("never.i0"))
    error = RuntimeError("the model's")

    def model() -> None:
        raise error

    with pytest.raises(RuntimeError) as caught:
        scene.run(model)
    assert caught.value is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_that_are_no_exceptions_come_out_of_blocks(scene: Scene, kind: type[BaseException]) -> None:
    @scene.block
    def fails(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise kind

    with pytest.raises(kind):
        scene.provide(("a", 0))


def test_models_own_except_does_not_keep_a_failed_run_alive(scene: Scene) -> None:
    @scene.block
    def fails(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise KeyError("the block's")

    def model() -> str:
        try:
            scene.interleaver.handle("a", 0, iterate=True)
        except Exception:  # noqa: BLE001 - as models do that fall back to something
            return "fell back"
        return "went on"

    with pytest.raises(KeyError, match="the block's"):
        scene.run(model)


def test_model_that_swallows_anything_still_ends_in_the_blocks_error(scene: Scene) -> None:
    @scene.block
    def fails(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise KeyError("the block's")

    def model() -> str:
        with contextlib.suppress(BaseException):
            scene.interleaver.handle("a", 0, iterate=True)
        return "went on"

    with pytest.raises(KeyError, match="the block's"):
        scene.run(model)


def test_stopping_ends_the_model_quietly(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0"))
        mediator.stop()
        scene.log.append("after")

    def model() -> str:
        scene.interleaver.handle("a", 1, iterate=True)
        scene.log.append("model went on")
        return "result"

    assert scene.run(model) is None
    assert scene.log == [1]


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


def test_block_that_is_done_keeps_what_it_has_when_another_stops(scene: Scene) -> None:
    @scene.block
    def stops(mediator: Mediator) -> None:
        mediator.request("a.i0")
        mediator.stop()

    @scene.block
    def also_at_a(mediator: Mediator) -> None:
        scene.log.append(mediator.request("a.i0"))

    scene.provide(("a", 1), ("b", 2))
    assert scene.log in ([], [1]), "whether it is served depends on order; it must not fail"


def test_stopping_before_anything_keeps_the_model_from_running(scene: Scene) -> None:
    scene.block(lambda mediator: mediator.stop())
    assert scene.run(lambda: scene.log.append("model")) is None
    assert scene.log == []


def test_early_stop_raised_by_hand_counts_as_a_stop(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        mediator.request("a.i0")
        raise EarlyStopException

    assert scene.provide(("a", 1)) is None


def test_stop_that_a_block_catches_has_stopped_all_the_same(scene: Scene) -> None:
    @scene.block
    def block(mediator: Mediator) -> None:
        mediator.request("a.i0")
        try:
            mediator.stop()
        except EarlyStopException:
            scene.log.append("caught")
            scene.log.append(mediator.request("b.i0"))

    assert scene.provide(("a", 1), ("b", 2)) is None
    assert scene.log == ["caught"]


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


def test_handling_nothing_in_particular_returns_the_value() -> None:
    assert Interleaver().handle(value=3) == 3
    assert Interleaver().handle("a", 3) == 3
    assert Interleaver().handle("a", 3, iterate=True) == 3


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


# Properties of any holder.


class Holder:
    """Something with values, as a model's own part or a tracer is."""

    def __init__(self, interleaver: Interleaver, path: str | None) -> None:
        self.interleaver = interleaver
        self.path = path
        self.prepared: list[str] = []

    @eproperty()
    def plain(self) -> Any:
        """A value."""

    @eproperty(key="numbers", description="doubled")
    def doubled(self) -> Any:
        """The numbers times two."""

    @doubled.preprocess
    def _doubled(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @doubled.postprocess
    def _halved(self, value: torch.Tensor) -> torch.Tensor:
        return value / 2

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
    assert Holder.doubled.provider(Holder(scene.interleaver, "part")) == "part.numbers"


def test_properties_keep_their_name_description_and_docstring() -> None:
    assert isinstance(Holder.doubled, eproperty)
    assert (Holder.doubled.name, Holder.doubled.key) == ("doubled", "numbers")
    assert Holder.doubled.description == "doubled"
    assert Holder.doubled.__doc__ == "The numbers times two."
    assert Holder.doubled.iterate
    assert not Holder.once.iterate


def test_preprocess_and_postprocess_stand_between_the_block_and_the_model(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.block
    def block(mediator: Mediator) -> None:
        scene.log.append(holder.doubled.tolist())
        holder.doubled = torch.tensor([10.0, 20.0])

    assert scene.provide(("part.numbers", torch.tensor([1.0, 2.0])))[0].tolist() == [5.0, 10.0]
    assert scene.log == [[2.0, 4.0]]


def test_preprocessed_copy_that_is_edited_does_not_reach_the_model_without_transform(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.block
    def block(mediator: Mediator) -> None:
        holder.doubled[:] = 0

    assert scene.provide(("part.numbers", torch.ones(2)))[0].tolist() == [1.0, 1.0]


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


def test_transform_is_for_one_reading_each(scene: Scene) -> None:
    holder = Holder(scene.interleaver, "part")

    @scene.block
    def block(mediator: Mediator) -> None:
        copy = holder.copied
        copy += 1
        again = holder.copied
        scene.log.append(again.tolist())
        again += 1
        mediator.request("part.numbers.i1")

    left = scene.provide(("part.numbers", torch.zeros(2)), ("part.numbers", torch.zeros(2)))
    assert scene.log == [[1.0, 1.0]]
    assert [value.tolist() for value in left] == [[2.0, 2.0], [0.0, 0.0]]


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


# Skipping, with modules.


class Batched(NNsight):
    """Takes tensors of any number of rows."""

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        return inputs, kwargs, len(inputs[0]) if inputs else 0

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.cat([batched_input[0][0], inputs[0]]),), {}


def test_skip_in_every_invoke_gives_each_its_own_value(layers: torch.nn.Sequential) -> None:
    model = Batched(layers)
    with model.trace() as tracer:
        with tracer.invoke(torch.zeros(1, 3)):
            model[1].skip(model[0].output * 10)
            first = model.output.save()
        with tracer.invoke(torch.ones(2, 3)):
            model[1].skip(model[0].output * 100)
            second = model.output.save()
    assert first.tolist() == [[17.0] * 3]
    assert second.tolist() == [[207.0] * 3] * 2


def test_skip_in_some_invokes_only_is_an_error_that_says_so(layers: torch.nn.Sequential) -> None:
    model = Batched(layers)
    with (
        pytest.raises(ValueError, match=r"model\.1 is skipped in 1 of 2 invokes"),
        model.trace() as tracer,
    ):
        with tracer.invoke(torch.zeros(1, 3)):
            model[1].skip(model[0].output)
        with tracer.invoke(torch.ones(2, 3)):
            model.output.save()


def test_skip_in_an_empty_invoke_skips_for_all(layers: torch.nn.Sequential) -> None:
    model = Batched(layers)
    with model.trace() as tracer:
        with tracer.invoke(torch.zeros(1, 3)):
            first = model.output.save()
        with tracer.invoke(torch.ones(2, 3)):
            second = model.output.save()
        with tracer.invoke():
            model[1].skip(model[0].output)
    assert first.tolist() == [[8.0] * 3]
    assert second.tolist() == [[9.0] * 3] * 2


def test_skipped_module_does_not_run(layers: torch.nn.Sequential) -> None:
    model = Batched(layers)
    with model.trace(torch.zeros(1, 3)):
        model[2].skip(torch.full((1, 3), -1.0))
        skipped = model[2].output.save()
        out = model.output.save()
    assert skipped.tolist() == [[-1.0] * 3]
    assert out.tolist() == [[3.0] * 3]


def test_skip_of_rows_that_do_not_fit_is_an_error(layers: torch.nn.Sequential) -> None:
    model = Batched(layers)
    with pytest.raises((ValueError, RuntimeError)), model.trace() as tracer:
        with tracer.invoke(torch.zeros(1, 3)):
            model[1].skip(torch.zeros(1, 3))
        with tracer.invoke(torch.ones(2, 3)):
            model[1].skip(torch.zeros(1, 4))
    with model.trace(torch.zeros(1, 3)):
        out = model.output.save()
    assert out.tolist() == [[10.0] * 3]
