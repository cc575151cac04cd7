"""Tensors that are larger than their memory are looked at before they are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine.core.tensor_bytes import flat_bytes
from nnsight_engine.interleaving.batching import Batcher
from nnsight_engine.interleaving.threads import Threads
from nnsight_engine.serialization import decode, encode
from nnsight_engine.vllm_backend.traces.errors import TraceBytesError
from nnsight_engine.vllm_backend.traces.memory_accounting import MemoryAccount, num_bytes
from nnsight_engine.vllm_backend.traces.messages import slot_of
from nnsight_engine.vllm_backend.traces.rows import FlatBatcher, RowSpan, zeros_of
from nnsight_engine.vllm_backend.traces.trace_end import TraceEnd

HUGE = 2**40
LARGE: dict[str, Any] = {
    "expanded": lambda: torch.zeros(1).expand(HUGE),
    "broadcast": lambda: torch.broadcast_to(torch.zeros(1, 1), (2**20, 2**20)),
    "strided": lambda: torch.zeros(1).as_strided((2**20, 2**20), (0, 0)),
    "bytes": lambda: torch.zeros(1, dtype=torch.uint8).expand(HUGE),
    "windows": lambda: torch.zeros(2**20).unfold(0, 2**19, 1),
}
COMPLEX: dict[str, Any] = {"complex": lambda: torch.zeros(1, dtype=torch.complex64).expand(HUGE)}


@pytest.mark.parametrize("name", [*LARGE, *COMPLEX])
def test_what_is_saved_counts_as_what_it_will_be(name: str) -> None:
    value = {**LARGE, **COMPLEX}[name]()
    assert num_bytes([value]) >= value.nbytes >= 2**38
    assert num_bytes([{"a": [value, value]}]) == num_bytes([value])
    with pytest.raises(TraceBytesError):
        MemoryAccount(2**32, lambda: [value]).check(is_last=True)


def test_views_that_are_no_larger_than_their_memory_count_it_once() -> None:
    base = torch.zeros(100)
    assert num_bytes([base[:10], base[5:], base]) == base.nbytes
    assert num_bytes([base, base.view(10, 10).expand(3, 10, 10)]) == 3 * base.nbytes
    assert num_bytes([torch.empty(HUGE, device="meta")]) == 0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_what_they_hold(layout: torch.layout) -> None:
    sparse = torch.eye(64).to_sparse(layout=layout)
    assert num_bytes([sparse]) >= 64 * (4 + 8)


@pytest.mark.parametrize("name", [*LARGE, *COMPLEX])
def test_a_stream_that_is_replaced_needs_no_memory_before_its_shape_is_looked_at(name: str) -> None:
    value = {**LARGE, **COMPLEX}[name]()
    assert zeros_of(value).shape == value.shape
    assert zeros_of(value).untyped_storage().nbytes() == value.element_size()


WRONG: dict[str, Any] = {
    **LARGE,
    **COMPLEX,
    "sparse": lambda: torch.zeros(3, 4).to_sparse(),
    "meta": lambda: torch.zeros(3, 4, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3, 4), 0.1, 0, torch.qint8),
    "imaginary": lambda: torch.ones(3, 4, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", ["worker", "local"])
def test_what_is_written_is_looked_at_first(kind: str, name: str) -> None:
    batcher: Batcher = FlatBatcher(RowSpan()) if kind == "worker" else Batcher()
    batcher.total_batch_size = 5
    batcher.groups = [(1, 3)]
    batcher.current_value = torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"shape|cannot take the place"):
        batcher.swap((1, 3), WRONG[name]())
    assert torch.equal(batcher.current_value, torch.ones(5, 4))


@pytest.mark.parametrize("name", LARGE)
def test_what_leaves_a_sandbox_is_looked_at_first(name: str) -> None:
    with pytest.raises(TypeError, match="leave the sandbox"):
        slot_of(LARGE[name](), max_bytes=2**28)


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


def test_what_flows_between_blocks_is_no_larger_than_what_a_trace_may_save() -> None:
    block = {"saves": {}, "flows": {"x": torch.zeros(1).expand(2**30)}, "error": None}
    message: dict[str, Any] = {"blocks": [block], "before": None}
    assert TraceEnd(Threads(5.0), 2**20).encoded(message, 0, compress=False)
    assert "bytes that a message may have" in message["blocks"][0]["error"]["message"]
