"""The tensors of a message are a safetensors file, and nothing else is taken for one."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch

from nnsight_engine.serialization import DecodeError, decode, encode
from nnsight_engine.serialization.message import SENT_DTYPES, read_segments, write_segments

TENSORS = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in SENT_DTYPES},
    "scalar": torch.tensor(2.5),
}


def file(entries: Any, data: bytes, header: bytes | None = None) -> memoryview:
    text = json.dumps(entries).encode() if header is None else header
    return memoryview(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_other_readers_read_what_is_written_and_the_other_way() -> None:
    written = b"".join(write_segments(TENSORS))
    for found in (
        safetensors.torch.load(written),
        read_segments(memoryview(safetensors.torch.save(TENSORS))),
    ):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype is tensor.dtype
            torch.testing.assert_close(found[name], tensor)
    assert write_segments({}) == []


def test_each_tensor_has_memory_of_its_own_that_may_be_written() -> None:
    data = bytearray(encode([torch.ones(2), torch.zeros(3)]))
    before = bytes(data)
    one, two = decode(data)
    one += 1
    assert (one.tolist(), two.tolist(), bytes(data)) == ([2, 2], [0, 0, 0], before)
    assert one.untyped_storage().nbytes() == one.nbytes
    shared = torch.ones(4)
    first, second = decode(encode([shared, shared[:2]]))
    first += 1
    assert second.tolist() == [1, 1]


BROKEN = {
    "short": memoryview(b"\x01\x00"),
    "header beyond the end": memoryview(struct.pack("<Q", 2**63)),
    "no JSON": file(None, b"", b"{nothing"),
    "no UTF-8": file(None, b"", b'{"\x9b": 1}'),
    "deep": file(None, b"", b"[" * 100_000),
    "no entries": file([1], b""),
    "overlap": file({"a": entry(0, 2), "b": entry(0, 2)}, b"12"),
    "gap": file({"a": entry(0, 1), "b": entry(2, 3)}, b"123"),
    "backwards": file({"a": entry(2, 0)}, b"12"),
    "beyond the data": file({"a": entry(0, 3)}, b"12"),
    "bytes behind": file({"a": entry(0, 1)}, b"12"),
    "nothing in it": file({"a": entry(0, 0)}, b""),
    "another size": file({"a": entry(0, 2, shape=[3])}, b"12"),
    "another type": file({"a": entry(0, 2, dtype="U16")}, b"12"),
    "negative": file({"a": entry(0, 2, shape=[-1, -2])}, b"12"),
    "endless": file({"a": entry(0, 2, shape=[2**70, 0])}, b"12"),
}


@pytest.mark.parametrize("view", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_such_file_is_a_decode_error(view: memoryview) -> None:
    with pytest.raises(DecodeError, match="broken"):
        read_segments(view)
