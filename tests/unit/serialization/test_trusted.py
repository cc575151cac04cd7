"""The trusted codec keeps the contract of the wire format, takes what that cannot, and stays where it is."""

# ruff: noqa: F841, RUF059 - a block's variables are looked at where it runs

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_engine.remote_backend.codecs import decode_blocks, encode_blocks
from nnsight_engine.serialization import (
    DecodeError,
    EncodeError,
    MessageLimits,
    SentBlock,
    decode_trace,
    decode_trace_pickled,
    encode_trace,
    encode_trace_pickled,
)
from tests.unit.serialization.recording import Recorder, run

FACTOR = 3


def tripled(value: int) -> int:
    return value * FACTOR


def test_variables_that_are_shared_stay_shared() -> None:
    count = 0

    def advance() -> int:
        nonlocal count
        count += 1
        return count

    def twice() -> tuple[int, Callable[[], Any]]:
        advance()
        return advance(), twice

    with Recorder() as recorder:
        before = count
        last, same = twice()
        after = count
    cells = dict(zip(advance.__code__.co_freevars, advance.__closure__ or (), strict=True))
    sent = SentBlock(recorder.kept.info, {**recorder.kept.cells, **cells})
    (info,) = decode_trace_pickled(encode_trace_pickled([sent])).blocks
    variables = run(info)
    assert (variables["before"], variables["last"], variables["after"]) == (0, 2, 2)
    assert variables["same"] is variables["twice"]
    assert count == 0


def test_it_takes_what_the_wire_cannot() -> None:
    without_source = eval("lambda value: value + FACTOR", {"FACTOR": 4})
    sparse = torch.eye(2).to_sparse()
    half = torch.ones(2, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.ones(2))
    with Recorder() as recorder:
        result = without_source(1), sparse.to_dense(), half, weight
    with pytest.raises(EncodeError):
        encode_trace([recorder.kept])
    number, dense, *tensors = run(decode_trace_pickled(encode_trace_pickled([recorder.kept])).blocks[0])[
        "result"
    ]
    assert number == 5
    assert torch.equal(dense, torch.eye(2))
    assert [(type(one), one.dtype) for one in tensors] == [
        (torch.Tensor, torch.bfloat16), (torch.nn.Parameter, torch.float32),
    ]  # fmt: skip


def test_neither_codec_takes_the_others_bytes_and_pickles_want_trust() -> None:
    with Recorder() as recorder:
        result = FACTOR
    pickled, plain = encode_trace_pickled([recorder.kept]), encode_trace([recorder.kept])
    with pytest.raises(DecodeError, match="no message"):
        decode_trace(pickled)
    with pytest.raises(DecodeError, match="no pickled trace"):
        decode_trace_pickled(plain)
    with pytest.raises(DecodeError, match="trusted"):
        decode_blocks("cloudpickle", pickled)
    with pytest.raises(DecodeError, match="wire, cloudpickle"):
        decode_blocks("marshal", pickled, trusted=True)
    for codec, data in (("cloudpickle", pickled), ("wire", plain)):
        assert run(decode_blocks(codec, data, trusted=True).blocks[0])["result"] == FACTOR
    assert encode_blocks("wire", [recorder.kept]) == plain


def test_broken_bytes_other_versions_and_too_many_bytes_are_refused() -> None:
    data = encode_trace_pickled([], {"a": [1, 2, 3]})
    for broken in (data[:-3], data[:8], data[:4] + b"\x09" + data[5:], data[:8] + b"\x80\x05junk"):
        with pytest.raises(DecodeError):
            decode_trace_pickled(broken)
    with pytest.raises(DecodeError, match="may have 10"):
        decode_trace_pickled(data, limits=MessageLimits(max_bytes=10))
    with pytest.raises(EncodeError, match="shared value `lock`"):
        encode_trace_pickled([], {"lock": threading.Lock()})
    with pytest.raises(EncodeError, match="may have 10"):
        encode_trace_pickled([], {"a": [1]}, limits=MessageLimits(max_bytes=10))
    with pytest.raises(DecodeError, match="refers to something"):
        decode_trace_pickled(encode_trace_pickled([], {"a": [1]}, reference=lambda _: ("x",)))


def test_code_of_another_python_is_refused_and_blocks_alone_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (sys.version_info.major, sys.version_info.minor)
    monkeypatch.setattr("nnsight_engine.serialization.trusted._HERE", (3, 99))
    with Recorder() as plain:
        result = FACTOR + 1
    with Recorder() as calling:
        result = tripled(1)
    block_alone = encode_trace_pickled([plain.kept])
    with_a_function = encode_trace_pickled([calling.kept])
    monkeypatch.setattr("nnsight_engine.serialization.trusted._HERE", own)
    assert run(decode_trace_pickled(block_alone).blocks[0])["result"] == 4
    with pytest.raises(DecodeError, match=rf"Python 3\.99.*Python {own[0]}\.{own[1]}.*'wire'"):
        decode_trace_pickled(with_a_function)
