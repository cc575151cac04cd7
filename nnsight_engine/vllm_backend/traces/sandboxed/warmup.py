"""A trace that every sandbox process runs before it is confined: first uses are slow, or need files.

A fork copies memory page by page when Python writes, even to objects that it only reads: here no request
waits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

from api_schemas.request_traces import Trace
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.request_code import encoded_code
from nnsight_engine.vllm_backend.traces.entry import TraceEntry
from nnsight_engine.vllm_backend.traces.messages import End, PassedPlaces, packed_value
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    Collect,
    OfferRows,
    StepMessage,
)
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_main import SandboxTraces

_CODE: Final = """
first = model.layers[0].output.save()
model.layers[0].output[:] *= 2
last = model.layers[-1].output[-1].float().softmax(-1).topk(2).values.sum().save()
print("ready", first.shape)
"""
_KEY: Final = "rehearsal"
_REQUEST: Final = "rehearsal-0"
_ROWS: Final = 2
_MAX_OFFERS: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Warmup:
    """The prepared trace; ``value`` is a layer's output, of zeros, in the form that the model returns."""

    entry: dict[str, Any]
    value: Any

    @staticmethod
    def of(points: ModelPoints) -> Warmup:
        data = encoded_code(Trace(op="trace", code=_CODE), "rehearsal")
        entry = TraceEntry(_KEY, 0, 1, data, [{}], streams=True, prints=True, sandbox_of=None)
        rows = torch.zeros(_ROWS, points.hidden_size, dtype=torch.bfloat16)
        whole = rows[None] if points.family.is_batched else rows
        return Warmup(entry.to_plain(), (whole, whole) if points.returns_residual else whole)

    def run(self, traces: SandboxTraces) -> None:
        traces.answer(BeginRequests([(_REQUEST, self.entry)]), memoryview(b""))
        traces.answer(StepMessage([(_REQUEST, _ROWS, 0, True)], [], PassedPlaces()), memoryview(b""))
        for _ in range(_MAX_OFFERS):
            wanted = next(iter(traces.dispatcher.wanted), None)
            if wanted is None:
                break
            slots, is_tuple, body = packed_value(self.value)
            offer = OfferRows(wanted, PassedPlaces(), slots, is_tuple)
            traces.answer(offer, memoryview(b"".join(body)))
        else:
            traces.answer(End(PassedPlaces()), memoryview(b""))
        traces.answer(Collect(_KEY, {}, []), memoryview(b""))


__all__ = ["Warmup"]
