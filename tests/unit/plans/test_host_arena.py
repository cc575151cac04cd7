"""What a step reads comes into memory that is kept, and is there until the next step's comes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nnsight_engine.plans.step.host_arena import HostArena, to_device

CPU = torch.device("cpu")


def some_values(scale: float) -> list[torch.Tensor]:
    return [
        torch.arange(6.0).reshape(2, 3) * scale,
        torch.tensor([[1.5, -2.0, 3.0]], dtype=torch.bfloat16) * scale,
        torch.empty(0, 4),
        torch.tensor([7, 9], dtype=torch.int32),
        torch.arange(12.0).reshape(3, 4).T * scale,
    ]


def test_values_come_as_they_were_when_they_were_brought() -> None:
    arena = HostArena(CPU)
    values = some_values(1)
    host = arena.start_copy(values)
    for value in values:
        value.zero_()
    arena.wait()
    for value, expected in zip(host, some_values(1), strict=True):
        assert value.dtype == expected.dtype
        assert value.is_contiguous()
        assert torch.equal(value, expected)


def test_every_step_has_the_same_memory() -> None:
    arena = HostArena(CPU)
    first = arena.start_copy(some_values(1))
    num_bytes = arena.num_bytes
    second = arena.start_copy(some_values(2))
    assert [value.data_ptr() for value in first] == [value.data_ptr() for value in second]
    assert torch.equal(first[0], some_values(2)[0])
    assert arena.num_bytes == num_bytes


def test_a_larger_step_gets_more_and_takes_nothing_from_the_one_before() -> None:
    arena = HostArena(CPU)
    (small,) = arena.start_copy([torch.ones(4)])
    before = arena.num_bytes
    (large,) = arena.start_copy([torch.full((before // 4 + 1,), 3.0)])
    assert arena.num_bytes == 2 * before
    assert torch.equal(large, torch.full_like(large, 3.0))
    assert small.tolist() == [1.0] * 4


@pytest.mark.parametrize("is_inside_first", [True, False])
def test_steps_run_in_and_out_of_inference(*, is_inside_first: bool) -> None:
    arena = HostArena(CPU)
    for is_inside in (is_inside_first, not is_inside_first):
        with torch.inference_mode(mode=is_inside):
            (value,) = arena.start_copy([torch.full((3,), float(is_inside))])
            assert value.tolist() == [float(is_inside)] * 3


def test_an_array_on_the_hosts_device_is_the_array() -> None:
    rows = np.array([3, 1], np.int64)
    index = to_device(rows, CPU)
    rows[0] = 5
    assert index.tolist() == [5, 1]
