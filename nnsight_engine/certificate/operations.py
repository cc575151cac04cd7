"""Declarative operations on the engine of a ``VLLM``, as a server's requests have them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm import RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

from api_schemas.interventions import parse_interventions
from api_schemas.limits import RequestLimits
from nnsight_engine.certificate.measurements import LOGITS
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.leaves import EXPERTS, PATTERN, STATE
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensor_bytes import tensor_from_bytes
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.plans.collect.results import CollectedCapture, CollectedResults, TensorResult
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.vllm_backend.call import prepare_params, salted
from nnsight_engine.vllm_backend.engines import SyncEngine
from nnsight_engine.vllm_backend.output_payloads import deliver_payloads
from nnsight_engine.vllm_backend.result_router import ResultRouter
from nnsight_engine.vllm_backend.rpc_results import answer
from nnsight_engine.vllm_backend.vllm import VLLM

_LAST: Final = {"positions": [-1]}
_LAST_LOGITS: Final = {"op": "capture", "at": LOGITS, "name": LOGITS, "where": _LAST}


class OperationRunner:
    """Runs requests with operations, one at a time; the model's blocking engine has started."""

    def __init__(self, model: VLLM, prompt_ids: list[int], adapter: LoRARequest | None = None) -> None:
        assert isinstance(model.host, SyncEngine)  # noqa: S101 - a certificate's own
        self._engine = model.host
        self._ids = prompt_ids
        self._adapter = adapter
        self.spec = ModelSpec.from_plain(answer(self._engine.call("describe_interventions")))
        self._router = ResultRouter(self.spec)
        self._token_of = TokenTexts(model.tokenizer).token
        deliver_payloads(self._engine.inner.llm_engine.output_processor, {PLAN_KEY: self._router.deliver})

    def offers(self, point: str) -> bool:
        """Return whether operations may name a point: some ranks do not have all that blocks have."""
        layer, _, leaf = point.removeprefix("layers.").partition(".")
        if not point.startswith("layers."):
            return self.spec.leaf(point) is not None
        return self.spec.leaf(leaf, int(layer)) is not None

    def generate(self, num_tokens: int, num_logprobs: int) -> RequestOutput:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, logprobs=num_logprobs, ignore_eos=True
        )
        return self._output(params, None)

    def _output(self, params: SamplingParams, salt: str | None) -> RequestOutput:
        prompt: dict[str, Any] = {"prompt_token_ids": self._ids}
        if salt is not None:
            prompt["cache_salt"] = salt
        (output,) = self._engine.run([prompt], [params], [self._adapter])
        return output

    def capture(self, points: Sequence[str]) -> dict[str, torch.Tensor]:
        """Capture points at all positions, logits at the last one; shapes are those of ``blocks.read``.

        Raises:
            ApiError: The model does not offer one of them to operations.
            InterventionError: The request failed.
        """
        alone = [one for one in points if one.endswith((PATTERN, EXPERTS, STATE))]
        vectors = [one for one in points if one != LOGITS and one not in alone]
        operations: list[dict[str, Any]] = [
            {
                "op": "capture",
                "at": [point],
                "name": point,
                "where": _LAST if point.endswith(STATE) else {"phase": "prompt"},
            }
            for point in alone
        ]
        if vectors:
            operations.append(
                {"op": "capture", "at": vectors, "name": "values", "where": {"phase": "prompt"}}
            )
        if LOGITS in points:
            operations.append(_LAST_LOGITS)
        found = {
            point: _as_tensor(result)
            for capture in self._run(operations).results
            if isinstance(capture, CollectedCapture)
            for point, result in capture.points.items()
        }
        for point, value in found.items():
            if point.endswith(PATTERN):
                found[point] = value.transpose(0, 1)
            elif point.endswith(STATE):
                found[point] = value[0]
        return found

    def steer(self, point: str, change: torch.Tensor) -> torch.Tensor:
        """Add to a point, as ``blocks.write_in_place`` does, and return the same logits; raises likewise."""
        where = _LAST if point == LOGITS else {"range": [1, len(self._ids)]}
        steer = {"op": "steer", "at": point, "vector": change.flatten().tolist(), "where": where}
        (capture,) = self._run([steer, _LAST_LOGITS]).results
        assert isinstance(capture, CollectedCapture)  # noqa: S101 - the request's only result
        return _as_tensor(capture.points[LOGITS]).flatten()

    def _run(self, operations: Sequence[dict[str, Any]]) -> CollectedResults:
        parsed = parse_interventions(list(operations), RequestLimits(max_operations=len(operations)))
        compiled = compile_request(
            parsed,
            spec=self.spec,
            prompt_token_ids=self._ids,
            max_tokens=1,
            token_of=self._token_of,
            stream=False,
        )
        key = uuid.uuid4().hex
        (collector,) = self._router.open(
            key,
            compiled.plan,
            prompt_token_ids=self._ids,
            op_names=[one.op for one in parsed],
            num_choices=1,
        )
        try:
            params = SamplingParams(temperature=0.0, max_tokens=1)
            prepare_params(params, compiled, key)
            output = self._output(params, salted(compiled, None, key))
            if collector.failure is not None:
                raise InterventionError(collector.failure.code, collector.failure.message)
            return collector.take_final(output.outputs[0].token_ids)
        finally:
            self._router.close(key)


def _as_tensor(result: TensorResult) -> torch.Tensor:
    return tensor_from_bytes(result.dtype, result.shape, result.data).float()


__all__ = ["OperationRunner"]
