"""The values that a step reads are copied into memory that is used again once they have been delivered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nnsight_engine.plans.step.host_arena import HostArena, HostCopy, to_device

CPU = torch.device("cpu")


def some_values(scale: float) -> list[torch.Tensor]:
    return [
        torch.arange(6.0).reshape(2, 3) * scale,
        torch.tensor([[1.5, -2.0, 3.0]], dtype=torch.bfloat16) * scale,
        torch.empty(0, 4),
        torch.tensor([7, 9], dtype=torch.int32),
        torch.arange(12.0).reshape(3, 4).T * scale,
    ]


def test_memory_is_used_again_once_its_values_were_read() -> None:
    arena = HostArena(CPU)
    first = arena.start_copy(some_values(1))
    second = arena.start_copy(some_values(2))
    with first.arrived():
        assert torch.equal(first.values[0], some_values(1)[0]), "the second step has memory of its own"
    third = arena.start_copy(some_values(3))
    assert addresses(third) == addresses(first)
    with second.arrived():
        assert torch.equal(second.values[0], some_values(2)[0])
    with third.arrived():
        assert torch.equal(third.values[0], some_values(3)[0])


@pytest.mark.parametrize("is_inside_first", [True, False])
def test_steps_run_in_and_out_of_inference(*, is_inside_first: bool) -> None:
    arena = HostArena(CPU)
    for is_inside in (is_inside_first, not is_inside_first):
        with torch.inference_mode(mode=is_inside):
            copy = arena.start_copy([torch.full((3,), float(is_inside))])
            with copy.arrived():
                assert copy.values[0].tolist() == [float(is_inside)] * 3


def addresses(copy: HostCopy) -> list[int]:
    return [value.data_ptr() for value in copy.values]


def test_an_array_on_the_hosts_device_is_the_array() -> None:
    rows = np.array([3, 1], np.int64)
    index = to_device(rows, CPU)
    rows[0] = 5
    assert index.tolist() == [5, 1]
