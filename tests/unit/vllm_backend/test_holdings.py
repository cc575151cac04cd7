"""The bytes of a traced request: shared memory once, nothing of the user's run, and a limit that is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.vllm_backend.traces.errors import TraceBytesError
from nnsight_engine.vllm_backend.traces.memory_accounting import MemoryAccount, num_bytes


class Hostile(list[Any]):
    """A list that minds being looked at."""

    def __iter__(self) -> Any:
        raise SystemExit

    def __len__(self) -> int:
        raise SystemExit

    @property  # type: ignore[misc] # code that no type checker passed
    def __class__(self) -> Any:
        raise SystemExit


def test_memory_counts_once_and_as_a_whole() -> None:
    whole = torch.zeros(10, 4)
    assert num_bytes([whole, whole[0], {"a": (whole[1:], {whole})}]) == 160
    assert num_bytes([whole[0].clone()]) == 16
    assert num_bytes([np.zeros(3), b"abc", "ab", 5, None]) == 24 + 3 + 2


def test_containers_may_hold_themselves_and_be_of_any_class() -> None:
    cycle: list[Any] = [torch.zeros(2)]
    cycle.append(cycle)
    assert num_bytes([cycle, Hostile([torch.zeros(3)])]) == 8 + 12
    assert num_bytes([torch.zeros(2, 2).to_sparse(), torch.nn.Parameter(torch.zeros(2))]) == 8


def test_what_is_saved_is_counted_when_it_could_be_too_much() -> None:
    saved: list[torch.Tensor] = []
    looks = []

    def look() -> list[torch.Tensor]:
        looks.append(len(saved))
        return saved

    memory = MemoryAccount(1000, look)
    memory.give(100)
    memory.check()
    assert not looks, "so little cannot be too much"
    saved.append(torch.zeros(200))
    memory.give(200)
    memory.check()
    memory.keep("writes", 150)
    memory.check()
    memory.keep("chunks", 100)
    with pytest.raises(TraceBytesError, match=r"saved 800 bytes, and 250 are kept.*1000.*max_trace_bytes"):
        memory.check()
    memory.keep("chunks", -100)
    memory.check(is_last=True)
