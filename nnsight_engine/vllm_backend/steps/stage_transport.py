"""Operations' results between pipeline stages, in two more entries of vLLM's tensors.

They are taken out before vLLM's runner sees the dictionary, since it expects its own entries only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from vllm.sequence import IntermediateTensors

from nnsight_engine.plans.step.stage_results import StageResults

_HEAD: Final = "nnsight_engine_head"
_VALUES: Final = "nnsight_engine_values"
_ALIGNMENT: Final = 16


class Description(msgspec.Struct, array_like=True):
    """The results of a stage without its tensors, and the dtype and shape of each of these."""

    results: StageResults
    tensors: list[tuple[str, tuple[int, ...]]]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Description])


def with_results(output: IntermediateTensors, of_stages: Sequence[StageResults]) -> IntermediateTensors:
    described = [
        Description(
            dataclasses.replace(one, tensors=[]),
            [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in one.tensors],
        )
        for one in of_stages
    ]
    tensors = [tensor for one in of_stages for tensor in one.tensors]
    # A new object: with CUDA graphs, the output of all steps is the same one. Tensors only, and few: vLLM
    # transfers no more on a CPU.
    head = torch.frombuffer(bytearray(_ENCODER.encode(described)), dtype=torch.uint8)
    added = {_HEAD: head, _VALUES: _joined(tensors)} if tensors else {_HEAD: head}
    return IntermediateTensors({**output.tensors, **added})


def take_results(received: IntermediateTensors | None) -> list[StageResults]:
    """Remove and return the results that ``with_results`` has added; none on the first stage."""
    head = None if received is None else received.tensors.pop(_HEAD, None)
    if received is None or head is None:
        return []
    values, start, found = received.tensors.pop(_VALUES, None), 0, []
    for described in _DECODER.decode(head.numpy().tobytes()):
        for name, shape in described.tensors:
            dtype: torch.dtype = getattr(torch, name)
            stop = start + math.prod(shape) * dtype.itemsize
            described.results.tensors.append(values[start:stop].view(dtype).view(shape))
            start = _aligned(stop)
        found.append(described.results)
    return found


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    num_bytes = sum(_aligned(tensor.numel() * tensor.itemsize) for tensor in tensors)
    joined = torch.empty(num_bytes, dtype=torch.uint8, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel() * tensor.itemsize
        joined[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start = _aligned(stop)
    return joined


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
