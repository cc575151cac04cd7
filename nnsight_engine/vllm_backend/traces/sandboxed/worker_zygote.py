"""The zygote process of a worker: it has loaded vLLM's classes and the model's outline, but no weights.

Every sandbox process runs a small trace before it is confined, the warmup: first uses are slow, or need
files. A fork copies memory page by page when Python writes, even to objects that it only reads: here no
request waits.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from api_schemas.operations import Trace
from nnsight_engine.sandbox.block_checker import load_modules
from nnsight_engine.sandbox.channel import read_exactly
from nnsight_engine.sandbox.confine import ProcessLimits
from nnsight_engine.sandbox.zygote import NUMBER, fork_children
from nnsight_engine.serialization import decode
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.module_tree import ModelLayout
from nnsight_engine.vllm_backend.trace_code import encoded_code
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.messages import End, Offer, PassedPlaces, packed_value
from nnsight_engine.vllm_backend.traces.remote_modules import tree
from nnsight_engine.vllm_backend.traces.sandboxed.messages import (
    BeginRequests,
    Collect,
    StepMessage,
)
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_main import SandboxDispatcher, SandboxTraces

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
        """Return the trace of ``_CODE``, and the value that it is offered at each place."""
        data = encoded_code(Trace(op="trace", code=_CODE), "rehearsal")
        entry = TraceEntry(_KEY, 0, 1, data, [{}], streams=True, prints=True, sandbox_of=None)
        rows = torch.zeros(_ROWS, points.hidden_size, dtype=torch.bfloat16)
        whole = rows[None] if points.family.is_batched else rows
        return Warmup(entry.to_plain(), (whole, whole) if points.returns_residual else whole)

    def run(self, traces: SandboxTraces) -> None:
        """Send ``traces`` what a worker sends in one trace of one step, so that all code has run once."""
        traces.answer(BeginRequests([(_REQUEST, self.entry)]), memoryview(b""))
        traces.answer(StepMessage([(_REQUEST, _ROWS, 0, True)], [], PassedPlaces()), memoryview(b""))
        for _ in range(_MAX_OFFERS):
            wanted = next(iter(traces.dispatcher.wanted), None)
            if wanted is None:
                break
            slots, is_tuple, body = packed_value(self.value)
            offer = Offer(wanted, PassedPlaces(), slots, is_tuple)
            traces.answer(offer, memoryview(b"".join(body)))
        else:
            traces.answer(End(PassedPlaces()), memoryview(b""))
        traces.answer(Collect(_KEY, {}, []), memoryview(b""))


def main(orders: socket.socket, folder: str) -> None:
    """Read the setup from the worker, and fork processes as ordered; ``folder`` is empty, and isolated."""
    (num_bytes,) = NUMBER.unpack(read_exactly(orders.recv, NUMBER.size))
    setup = decode(read_exactly(orders.recv, num_bytes))
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    limits = EngineLimits(**setup["limits"])
    limits = dataclasses.replace(limits, trace_step_s=limits.sandbox_step_s)
    points = _points(setup)
    max_call_bytes = min(limits.sandbox_message_bytes, setup["call_bytes"])
    dispatcher = SandboxDispatcher(setup["entry"], frozenset(setup["refused"]), max_call_bytes)
    traces = SandboxTraces(points, limits, dispatcher)
    warmup = Warmup.of(points)
    share = ProcessLimits(limits.sandbox_bytes - 2 * limits.sandbox_message_bytes, limits.sandbox_cpu_s)
    _warm_up()
    fork_children(orders, folder, share, partial(traces.prepare_child, limits.sandbox_blocks, warmup.run))


def _points(setup: Mapping[str, Any]) -> ModelPoints:
    """Return the points of a model of stand-ins, built from the worker's description of its modules."""
    model = tree([tuple(entry) for entry in setup["modules"]], SandboxedError.attribute, {})
    layout = ModelLayout.from_plain(setup["layout"])
    family = layout.family
    layers = tuple(model.get_submodule(family.layers).children()) if family.layers else ()
    has_norm = family.final_norm in dict(model.named_modules(remove_duplicate=False))
    return ModelPoints(
        model=model,
        layout=layout,
        layers=layers,
        local_layers=range(len(layers)),
        final_norm=model.get_submodule(family.final_norm) if has_norm else None,
        project_out=None,
        **setup["sizes"],
    )


def _warm_up() -> None:
    """Trigger lazy loading now: confined processes cannot open files."""
    load_modules()
    value = torch.ones(4, 4, dtype=torch.bfloat16)
    torch.einsum("ij,jk->ik", value, value).float().softmax(-1).topk(2).values.tolist()
    repr(torch.linalg.svd(value.float()))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
