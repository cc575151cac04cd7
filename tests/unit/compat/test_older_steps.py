"""The older spelling of loops over steps: ``with tracer.iter[...]:``, as ``for`` would run it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight, save
from nnsight_engine.interleaving.events import MissedProviderError

OLDER = pytest.mark.filterwarnings("ignore:`with tracer.iter:DeprecationWarning")


class Cell(torch.nn.Module):
    """Counts, one call after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.part(x + 1))


class Steps(torch.nn.Module):
    """Calls its cell five times: outputs 1 to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = self.cell(x)
        return x


@pytest.fixture
def model() -> NNsight:
    return NNsight(Steps())


@pytest.fixture
def start() -> torch.Tensor:
    return torch.zeros(1, 1)


@OLDER
@pytest.mark.parametrize("steps", [slice(None), slice(1, 4), slice(0, None, 2), [0, 3], 2, slice(3, 9)])
def test_with_runs_its_block_once_for_each_step(model: NNsight, start: torch.Tensor, steps: Any) -> None:
    with model.trace(start) as tracer:
        older = save([])
        with tracer.iter[steps] as step:
            older.append((step, int(model.cell.output)))
        after = save(step)
    with model.trace(start) as tracer:
        newer = save([])
        for step in tracer.iter[steps]:
            newer.append((step, int(model.cell.output)))
    assert older == newer
    assert [step for step, _ in older] == [value - 1 for _, value in older]
    assert after == older[-1][0]


@OLDER
def test_all_is_every_step_and_edits_take_part(model: NNsight, start: torch.Tensor) -> None:
    with model.trace(start) as tracer:
        with tracer.all():
            model.cell.part.output[:] += 1
        result = tracer.result.save()
    assert int(result) == 10


@OLDER
def test_variables_are_those_of_the_block_around(model: NNsight, start: torch.Tensor) -> None:
    with model.trace(start) as tracer:
        total = 0
        with tracer.iter[:]:
            total += int(model.cell.output)
        last = save(total)
        with tracer.iter[0:0]:
            total = -1
        unchanged = save(total)
    assert last == unchanged == 15


@OLDER
def test_loops_may_stand_in_loops_and_in_functions(model: NNsight, start: torch.Tensor) -> None:
    def collect(tracer: Any, values: list[int]) -> None:
        with tracer.iter[1:3]:
            values.append(int(model.cell.output))

    with model.trace() as tracer:
        with tracer.invoke(start):
            values: list[int] = save([])
            collect(tracer, values)
        with tracer.invoke():
            seen = save([])
            for step in tracer.iter[0:2]:
                with tracer.iter[step + 2]:
                    seen.append(int(model.cell.output))
    assert values == [2, 3]
    assert seen == [3, 4]


@OLDER
def test_a_named_step_that_does_not_come_is_an_error(model: NNsight, start: torch.Tensor) -> None:
    with (
        pytest.raises(MissedProviderError, match="step 7 was not reached"),
        model.trace(start) as tracer,
        tracer.iter[7],
    ):
        model.cell.output.save()


class Twice(torch.nn.Module):
    """Calls a part of its cell once more in the end, so that calls do not tell how many steps there are."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.cell(x)
        return torch.as_tensor(self.cell.part(x))


@OLDER
def test_the_loop_ends_where_steps_cannot_be_distinguished(start: torch.Tensor) -> None:
    model = NNsight(Twice())
    with model.trace(start) as tracer:
        older = save([])
        with tracer.iter[:]:
            older.append(int(model.cell.output))
        after = save("ran")
    with model.trace(start) as tracer:
        newer = save([])
        for _ in tracer.iter[:]:
            newer.append(int(model.cell.output))
    assert older == newer == [1, 2, 3]
    assert after == "ran"


@pytest.mark.parametrize("loop", [lambda tracer: tracer.iter[:], lambda tracer: tracer.all()])
def test_with_says_what_to_write_and_for_says_nothing(
    model: NNsight, start: torch.Tensor, loop: Callable[[Any], Any]
) -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"for step in tracer\.iter") as caught,
        model.trace(start) as tracer,
        loop(tracer),
    ):
        model.cell.output.save()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(start) as tracer:
            for _ in tracer.iter[:]:
                model.cell.output.save()
