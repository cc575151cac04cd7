"""Traces among the requests: a block does what operations say, so that one reference serves both."""

from __future__ import annotations

from typing import Any, Final, cast

import torch

from nnsight_engine import save
from nnsight_engine.core.tensors import tensor_to_bytes
from nnsight_engine.plans.collect.results import CollectedCapture, CollectedResults, TensorResult
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import SentTrace
from tests.e2e.fuzz.vectors import numbers
from tests.e2e.traces import HeldTracer, collected

_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def sent_trace(model: VLLM, request: dict[str, Any]) -> SentTrace:
    """Return a request's operations as a block, not yet run.

    Each names one point of a layer and all positions, in the order in which the model comes to them: a
    ``steer`` by ``add``, an ``ablate`` of all units, or a ``capture``. ``in_place`` says how a write is made.
    """
    program = [
        (op["op"], op["at"], op.get("name"), _added(op), op.get("in_place", False))
        for op in request["interventions"]
    ]
    sampling = {"temperature": 0.0, "ignore_eos": True, **request["sampling"]}
    opened = model.trace(request["ids"], max_tokens=request["max_tokens"], tracer_cls=HeldTracer, **sampling)
    with cast("HeldTracer", opened) as held:
        rows: Any = save({name: [] for _, _, name, _, _ in program if name})
        for _ in held.iter[:]:
            for kind, point, name, added, in_place in program:
                value = model.points[point]
                if kind == "capture":
                    rows[name].append(value.clone())
                elif kind == "steer" and in_place:
                    value[:] += added.to(value.dtype)
                elif kind == "steer":
                    model.points[point] = value + added.to(value.dtype)
                elif in_place:
                    value[:] = 0
                else:
                    model.points[point] = torch.zeros_like(value)
    sent: SentTrace = held.sent
    return sent


def traced_results(
    model: VLLM, trace: SentTrace, request: dict[str, Any], output: Any
) -> CollectedResults | ChunkedPromptError:
    """Return what a block has seen, as captures; or the error that its prompt came in chunks."""
    outcome = collected(model, trace, [output])
    if isinstance(outcome.error, ChunkedPromptError):
        return outcome.error
    if outcome.error is not None:
        raise outcome.error
    results = []
    for op in request["interventions"]:
        if op["op"] == "capture":
            values = torch.cat(outcome.saves["rows"][op["name"]])
            tensor = TensorResult(_NAMES[values.dtype], tuple(values.shape), bytes(tensor_to_bytes(values)))
            results.append(CollectedCapture(op["name"], list(range(len(values))), "none", {op["at"]: tensor}))
    return CollectedResults(results, is_code=True)


def _added(op: dict[str, Any]) -> torch.Tensor:
    return op["scale"] * numbers(op["vector"]).flatten() if op["op"] == "steer" else torch.empty(0)
