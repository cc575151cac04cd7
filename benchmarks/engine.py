"""vLLM's engine in this process, driven step by step: plain, or able to intervene.

Both kinds get the same engine arguments. A request with interventions passes through the same parsing,
compiling and collecting as over HTTP, and a run counts only if everything that it requested was applied. The
environment must be ``benchmarks.tables.ENVIRONMENT``: the engine core in this process. vLLM chooses the rest
by itself, as for its users: asynchronous scheduling, and on a GPU graphs.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from api_schemas.interventions import parse_interventions
from benchmarks.case import NotMeasuredError
from benchmarks.engine_arguments import engine_arguments
from benchmarks.interventions import Content, JsonObject, LayerSizes, SavedLayers
from nnsight_engine import save
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.core.work_context import GRAPH, TAP
from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.vllm_backend.operations_call import prepare_params, salted
from nnsight_engine.vllm_backend.outputs import ResultRouter, deliver_payloads
from nnsight_engine.vllm_backend.running_trace import results_of
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import RequestTracer, SentTrace

_TAP_OPERATORS: Final = "nnsight_engine::"
_GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}


class BenchmarkError(NotMeasuredError):
    """A measurement that would not mean what its name says."""


@dataclasses.dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request in flight, with the collector of its results or its trace; a plain one has neither."""

    request_id: str
    collector: RequestCollector | None = None
    trace: SentTrace | None = None
    num_layers: int = 0


class _UnsentTracer(RequestTracer):
    """A trace whose request is submitted by the engine below, so that steps can be timed one by one."""

    sent: SentTrace

    def _run_model(self) -> None:
        self.sent = SentTrace(self)


class StepwiseEngine:
    """An engine with the bundled model, or another; plain vLLM unless it is ``able`` to intervene.

    ``max_step_tokens`` is the largest number of prompt tokens in one step. A model ``is_random`` if its
    folder has no weights.
    """

    def __init__(
        self,
        *,
        able: bool,
        eager: bool,
        max_num_seqs: int,
        max_step_tokens: int = 0,
        model: str = "",
        is_random: bool = False,
    ) -> None:
        arguments = engine_arguments(eager=eager, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens)
        if is_random:
            arguments["load_format"] = "dummy"
        model = model or str(bundled_model_path())
        self._model = VLLM(model, dispatch=True, **arguments) if able else None
        self._llm: Any = LLM(model=model, **arguments) if self._model is None else self._model.engine
        self._core: Any = self._llm.llm_engine
        config = self._llm.model_config.hf_text_config
        self.shape = LayerSizes(config.num_hidden_layers, config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        if self._model is not None:
            (plain,) = self._llm.collective_rpc("describe_interventions")
            self._spec = ModelSpec.from_plain(plain)
            self._router = ResultRouter(self._spec)
            deliver_payloads(self._core.output_processor, {PLAN_KEY: self._router.deliver})

    @property
    def able_model(self) -> VLLM:
        """The engine as a model that can be traced."""
        if self._model is None:
            raise BenchmarkError("a plain engine cannot trace; use the one that is able to intervene")
        return self._model

    @property
    def layers(self) -> Any:
        """The layers of the model in the worker, for PyTorch hooks."""
        worker = self._core.model_executor.driver_worker.worker
        return worker.model_runner.get_model().model.layers

    @property
    def num_ahead(self) -> int:
        """How many steps vLLM starts before it has the results of an earlier one: 1 if it is asynchronous."""
        return int(self._core.vllm_config.max_concurrent_batches) - 1

    @property
    def compile_key(self) -> str:
        """The part of the compile cache's key that comes from the configuration."""
        return str(self._core.vllm_config.compute_hash())

    @property
    def num_tokens(self) -> int:
        """How many tokens the unfinished requests have generated, as far as results have arrived."""
        states = self._core.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in states)

    def submit(self, prompt: Sequence[int], max_tokens: int, content: Content) -> SubmittedRequest:
        """Queue a request that generates exactly ``max_tokens`` greedy tokens."""
        if isinstance(content, SavedLayers):
            return self._submit_traced(prompt, max_tokens, content.layers)
        params = SamplingParams(**_GREEDY, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)
        request_id = uuid.uuid4().hex
        own: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        collector = self._intervene(request_id, own, params, content) if content else None
        self._core.add_request(request_id, own, params)
        return SubmittedRequest(request_id, collector)

    def _submit_traced(self, prompt: Sequence[int], max_tokens: int, layers: range) -> SubmittedRequest:
        model = self.able_model
        with model.trace(list(prompt), tracer_cls=_UnsentTracer, max_tokens=max_tokens, **_GREEDY) as tracer:
            kept = save([])
            for _ in tracer.iter[:]:
                for layer in layers:
                    kept.append(model.layers[layer].output)
        sent: SentTrace = tracer.sent
        (params,) = sent.params
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._core.add_request(sent.key, sent.prompts[0], params)
        return SubmittedRequest(sent.key, trace=sent, num_layers=len(layers))

    def _intervene(
        self, request_id: str, content: dict[str, Any], params: Any, interventions: list[JsonObject]
    ) -> RequestCollector:
        ops, ids = parse_interventions(interventions), content["prompt_token_ids"]
        compiled = compile_request(
            ops,
            spec=self._spec,
            prompt_token_ids=ids,
            max_tokens=params.max_tokens,
            token_of=TokenTexts(self._llm.get_tokenizer()).token,
            stream=False,
        )
        names = [op.op for op in ops]
        (collector,) = self._router.open(
            request_id, compiled.plan, prompt_token_ids=ids, op_names=names, num_choices=1
        )
        prepare_params(params, compiled, request_id)
        salt = salted(compiled, None, "benchmark")
        if salt is not None:
            content["cache_salt"] = salt
        return collector

    def step(self) -> list[Any]:
        """Start a step, wait for the one ``num_ahead`` before it, and return the requests that ended."""
        outputs: list[Any] = self._core.step()
        return outputs

    def finish(self, requests: Sequence[SubmittedRequest]) -> None:
        """Run until all requests have ended, and check them.

        Raises:
            BenchmarkError: An intervention failed, or was not applied at every generated position.
        """
        ended = self.drain()
        for request in requests:
            self.check(request, ended[request.request_id])

    def drain(self) -> dict[str, Any]:
        """Run until all requests have ended, and return their outputs by request id."""
        ended: dict[str, Any] = {}
        while self._core.has_unfinished_requests():
            ended |= {output.request_id: output for output in self.step()}
        return ended

    def check(self, request: SubmittedRequest, output: Any) -> None:
        """Raise BenchmarkError unless all interventions of a finished request were applied."""
        token_ids = list(output.outputs[0].token_ids)
        if request.trace is not None:
            self._check_traced(request.trace, output, request.num_layers * len(token_ids))
        elif request.collector is not None:
            self._check_collected(request.request_id, request.collector, token_ids)

    def _check_traced(self, trace: SentTrace, output: Any, num_wanted: int) -> None:
        (data,) = self.able_model.host.call("collect_trace", trace.key, results_of({0: output}))
        (outcome,) = trace.read(data, [output])
        if outcome.error is not None:
            raise outcome.error
        num_kept = len(outcome.saves["kept"])
        if num_kept != num_wanted:
            raise BenchmarkError(f"a trace must save {num_wanted} values, it saved {num_kept}")

    def _check_collected(self, request_id: str, collector: RequestCollector, token_ids: list[int]) -> None:
        self._router.close(request_id)
        if collector.failure is not None:
            raise BenchmarkError(f"an intervention failed: {collector.failure.message}")
        collected = collector.take_final(token_ids)
        for applied in collected.applied:
            # The last token is sampled and never fed back, so it has no position of its own.
            # Where an operation with a condition acts is up to the model.
            num_wanted = 0 if applied.decides is not None else len(token_ids) - 1
            if len(applied.positions) < num_wanted or collected.tier not in {TAP, GRAPH}:
                raise BenchmarkError(
                    f"`{applied.op}` must reach all {len(token_ids) - 1} generated positions by taps, it "
                    f"reached {len(applied.positions)} by {collected.tier}; the engine is at fault"
                )

    def check_taps(self) -> None:
        """Raise BenchmarkError where the engine has taps and should not, or the reverse.

        Two engines in one process share the compiler's caches; taking the other's graph would make a
        comparison meaningless without a sign of it. On a GPU graphs replay without the operators of taps, so
        nothing is counted there; ``compile_key`` still differs.
        """
        if current_platform.is_cuda():
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.finish([self.submit([1, 2, 3], 2, [])])
        num_taps = sum(event.count for event in profile.key_averages() if _TAP_OPERATORS in event.key)
        # Two steps, a tap before the first layer and one after each.
        expected = 2 * (self.shape.num_layers + 1) if self._model is not None else 0
        if num_taps != expected:
            raise BenchmarkError(
                f"the engine must run {expected} taps in two steps, it ran {num_taps}; clear vLLM's compile "
                "cache (VLLM_CACHE_ROOT, by default ~/.cache/vllm) and run again"
            )
