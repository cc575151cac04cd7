"""Scans on vLLM: shapes of all values without their data, of a real request, as vLLM needs real tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_engine.core.trees import tensors
from nnsight_engine.vllm_backend.request_tracer import Purpose, RequestTracer, SentTrace

if TYPE_CHECKING:
    from collections.abc import Mapping


class RequestScanner(RequestTracer):
    """``with model.scan(prompt):`` on ``VLLM``; afterwards envoys return values without data."""

    def _run_model(self) -> Any:
        trace = SentTrace(self, Purpose.SCAN)
        outcomes, outputs = self._send(trace)
        trace.assign_saved(outcomes)
        if outcomes:
            self._leave(outcomes[0].shapes, len(outputs[0].prompt_token_ids or ()))
        return outputs[0] if len(outputs) == 1 else outputs

    def _leave(self, shapes: Mapping[str, Mapping[str, Any]], num_tokens: int) -> None:
        for path, envoy in self.model.named_modules():
            envoy._fake.update(shapes.get(path, {}))  # noqa: SLF001 - local scans store theirs there too
        points = self.model.points
        layer = shapes.get(str(points.layer(0).path), {})
        first = next(tensors(layer.get("output")), None)
        if first is not None:
            points.scanned = (num_tokens, first.dtype)
