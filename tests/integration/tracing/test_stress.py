"""Thousands of traces in one process, most of them ending badly, leave nothing behind and change nothing."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.tracing.ways import WAYS, RefusedError, Unmarked, X, deep, num_greenlets
from tests.small_models import Rows

pytestmark = pytest.mark.heavy


def resident_bytes() -> int:
    """Memory that this process holds."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("resident memory is read from /proc")
    return int(statm.read_text().split()[1]) * 4096


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_model_is_as_before_after_a_trace(
    way: Callable[[Rows], None], model: Rows, unmarked: Unmarked
) -> None:
    for depth in range(8):
        deep(depth, lambda: way(model))
        unmarked.check()


def test_ten_thousand_traces_leave_nothing_behind(model: Rows, unmarked: Unmarked) -> None:
    chance = random.Random(0)

    def trace(times: int) -> None:
        for _ in range(times):
            deep(chance.randint(0, 5), lambda: chance.choice(WAYS)(model))

    trace(1500)
    unmarked.check()
    stacks, memory = num_greenlets(), resident_bytes()
    trace(8500)
    unmarked.check()
    assert num_greenlets() <= stacks + 8
    assert resident_bytes() - memory < 8 * 2**20, "a kilobyte for each trace would be more"


def test_activations_die_with_their_trace(model: Rows) -> None:
    """Nothing that waits for the next trace holds what this one saw, or memory would be missing."""
    made: list[weakref.ref[torch.Tensor]] = []

    def counted(value: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(value))
        return value

    def trace() -> None:
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(X):
                first = counted(model[0].output)
                barrier()
                model[1].output = first
            with tracer.invoke(X):
                second = counted(model[0].output)
                barrier()
                model[2].output = second
            with tracer.invoke():
                counted(model.output)

    def fail() -> None:
        with pytest.raises(RefusedError), model.trace(X):
            hidden = counted(model[0].output)
            model[2].output = hidden
            raise RefusedError

    def both() -> None:
        trace()
        fail()

    for depth in range(5):
        deep(depth, both)
    gc.collect()
    assert len(made) == 20
    assert not [one for one in made if one() is not None]
