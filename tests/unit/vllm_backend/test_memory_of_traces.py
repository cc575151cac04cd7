"""The bytes of a traced request: what is saved counts as what it will be written out as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.core.tensors import flat_bytes
from nnsight_engine.interleaving.batching import Batcher
from nnsight_engine.interleaving.threads import Threads
from nnsight_engine.serialization import decode, encode
from nnsight_engine.vllm_backend.traces.errors import TraceBytesError
from nnsight_engine.vllm_backend.traces.memory_accounting import MemoryAccount, num_bytes
from nnsight_engine.vllm_backend.traces.messages import slot_of
from nnsight_engine.vllm_backend.traces.rows import FlatBatcher, RowSpan, zeros_of
from nnsight_engine.vllm_backend.traces.trace_store import TraceEnd

HUGE = 2**40
LARGE: dict[str, Any] = {
    "expanded": lambda: torch.zeros(1).expand(HUGE),
    "strided": lambda: torch.zeros(1).as_strided((2**20, 2**20), (0, 0)),
    "bytes": lambda: torch.zeros(1, dtype=torch.uint8).expand(HUGE),
    "windows": lambda: torch.zeros(2**20).unfold(0, 2**19, 1),
    "complex": lambda: torch.zeros(1, dtype=torch.complex64).expand(HUGE),
}
"""Tensors that are larger than their memory."""

WRONG: dict[str, Any] = {
    **LARGE,
    "sparse": lambda: torch.zeros(3, 4).to_sparse(),
    "meta": lambda: torch.zeros(3, 4, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3, 4), 0.1, 0, torch.qint8),
    "imaginary": lambda: torch.ones(3, 4, dtype=torch.complex64),
}


class Hostile(list[Any]):
    """A list that minds being looked at."""

    def __iter__(self) -> Any:
        raise SystemExit

    __len__ = __iter__

    @property  # type: ignore[misc] # code that no type checker passed
    def __class__(self) -> Any:
        raise SystemExit


WHOLE, ROWS = torch.zeros(10, 4), torch.zeros(100)
CYCLE: list[Any] = [torch.zeros(2)]
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([WHOLE, WHOLE[0], {"a": (WHOLE[1:], {WHOLE})}], 160),
        ([WHOLE[0].clone()], 16),
        ([np.zeros(3), b"abc", "ab", 5, None], 24 + 3 + 2),
        ([CYCLE, Hostile([torch.zeros(3)])], 8 + 12),
        ([torch.zeros(2, 2).to_sparse(), torch.nn.Parameter(torch.zeros(2))], 8),
        ([ROWS[:10], ROWS[5:], ROWS], 400),
        ([ROWS, ROWS.view(10, 10).expand(3, 10, 10)], 3 * 400),
        ([torch.empty(HUGE, device="meta")], 0),
    ],
)
def test_memory_counts_once_and_as_a_whole(values: list[Any], expected: int) -> None:
    assert num_bytes(values) == expected


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_what_they_hold(layout: torch.layout) -> None:
    assert num_bytes([torch.eye(64).to_sparse(layout=layout)]) >= 64 * (4 + 8)


@pytest.mark.parametrize("name", LARGE)
def test_a_tensor_larger_than_its_memory_counts_as_what_it_will_be(name: str) -> None:
    value = LARGE[name]()
    assert num_bytes([value]) >= value.nbytes >= 2**38
    assert num_bytes([{"a": [value, value]}]) == num_bytes([value])
    with pytest.raises(TraceBytesError):
        MemoryAccount(2**32, lambda: [value]).check(is_last=True)
    with pytest.raises(TypeError, match=r"leave the (sandbox|block's process)"):
        slot_of(value, max_bytes=2**28)
    # In place of a stream, it needs no memory before its shape is looked at.
    assert zeros_of(value).shape == value.shape
    assert zeros_of(value).untyped_storage().nbytes() == value.element_size()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("batcher", [FlatBatcher(RowSpan()), Batcher()], ids=["worker", "local"])
def test_what_is_written_is_looked_at_first(batcher: Batcher, name: str) -> None:
    batcher.total_batch_size = 5
    batcher.groups = [(1, 3)]
    batcher.current_value = torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"shape|cannot take the place"):
        batcher.swap((1, 3), WRONG[name]())
    assert torch.equal(batcher.current_value, torch.ones(5, 4))


def test_what_is_saved_is_counted_when_it_could_be_too_much() -> None:
    saved: list[torch.Tensor] = []
    looks = []

    def look() -> list[torch.Tensor]:
        looks.append(len(saved))
        return saved

    memory = MemoryAccount(1000, look)
    memory.count_given(100)
    memory.check()
    assert not looks, "so little cannot be too much"
    saved.append(torch.zeros(200))
    memory.count_given(200)
    memory.check()
    memory.keep("writes", 150)
    memory.check()
    memory.keep("chunks", 100)
    with pytest.raises(TraceBytesError, match=r"saved 800 bytes, and 250 are kept.*1000.*max_trace_bytes"):
        memory.check()
    memory.keep("chunks", -100)
    memory.check(is_last=True)


def test_what_flows_between_blocks_is_no_larger_than_what_a_trace_may_save() -> None:
    block = {"saves": {}, "flows": {"x": torch.zeros(1).expand(2**30)}, "error": None}
    message: dict[str, Any] = {"blocks": [block], "before": None}
    assert TraceEnd(Threads(5.0), 2**20).encoded(message, 0, compress=False)
    assert "bytes that a message may have" in message["blocks"][0]["error"]["message"]


def test_numbers_that_are_negated_when_they_are_read_leave_as_they_are_read() -> None:
    lazily = torch.tensor([1 + 2j]).conj().imag
    assert lazily.is_neg()
    _, content = slot_of(lazily)
    assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == [-2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_one_number_with_a_stride_travels_as_any_other(dtype: torch.dtype) -> None:
    every = torch.arange(8).to(dtype)
    for one in (every[4::4], every[3:4:2], every.view(2, 4)[1:, 1:2], every[2:2:2]):
        assert torch.equal(decode(encode(one)), one)
        anew = torch.tensor(one.tolist(), dtype=dtype).reshape(one.shape)
        assert torch.equal(flat_bytes(one), anew.view(-1).view(torch.uint8))
