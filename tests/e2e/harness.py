"""A real engine in this process, driven step by step, for tests of what happens inside it.

Requests go through the same parsing, compiling and collecting as over HTTP; only the HTTP
server is missing. One engine serves a whole test module.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL.Image import Image
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from api_schemas.fields import RequestLimits
from api_schemas.interventions import parse_interventions
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.plans.collect.collector import OperationResult, RequestCollector
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedResults,
    CollectedTrace,
)
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.request_plan import NO_MARKERS, PLAN_KEY, AnswerMarkers
from nnsight_engine.vllm_backend.compat import EngineLimits, engine_options
from nnsight_engine.vllm_backend.operations_call import prepare_params, salted
from nnsight_engine.vllm_backend.outputs import ResultRouter, deliver_payloads
from nnsight_engine.vllm_backend.request_parts import cache_media_once_sent, media_of
from nnsight_engine.vllm_backend.rpc_results import common_result
from tests.e2e.engine_kinds import options_of_process
from tests.e2e.fuzz.nearness import as_tensor
from tests.narrow_model import WIDTH

Interventions = list[dict[str, Any]]


@dataclasses.dataclass
class Ask:
    """One request: a prompt as text or ids, and what to do with it; ``run`` takes none that streams.

    Without an adapter it has the engine's. Its images stand where its text has the processor's mark.
    """

    prompt: str | list[int]
    interventions: Interventions = dataclasses.field(default_factory=list)
    max_tokens: int = 8
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    stream: bool = False
    cache_salt: str | None = None
    adapter: LoRARequest | None = None
    images: Sequence[Image] = ()


@dataclasses.dataclass
class Reply:
    """One choice of an answer."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]]
    collected: CollectedResults | None
    failure: Any
    num_cached_tokens: int

    def result(self, name: str) -> OperationResult:
        assert self.collected is not None, self.failure
        found = next(result for result in self.collected.results if result.name == name)
        assert not isinstance(found, CollectedTrace)
        return found

    def tensor(self, name: str, point: str) -> torch.Tensor:
        result = self.result(name)
        assert isinstance(result, CollectedCapture)
        return as_tensor(result.points[point])


def random_vector(seed: int, width: int = WIDTH) -> list[float]:
    """Return a fixed vector of normal numbers, by default as wide as the bundled model."""
    numbers: list[float] = np.random.default_rng(seed).normal(size=width).astype(np.float32).tolist()
    return numbers


class Engine:
    """vLLM's ``LLM`` with interventions.

    Attributes:
        adapter: The LoRA adapter of requests that name none.
        markers: Markers of the parts of answers.
    """

    adapter: LoRARequest | None = None
    markers: AnswerMarkers = NO_MARKERS

    def __init__(self, model: Path | str, *, limits: EngineLimits | None = None, **options: Any) -> None:
        """Load the model; engine arguments are vLLM's own."""
        defaults: dict[str, Any] = {
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "disable_log_stats": True,
        }
        ours = engine_options(limits or EngineLimits())
        llm = LLM(model=str(model), **(ours | defaults | options_of_process(model) | options))
        cache_media_once_sent(llm.llm_engine)
        self.use(llm)

    @classmethod
    def around(cls, llm: LLM) -> Engine:
        """Use an engine that has been started, and can intervene."""
        engine = cls.__new__(cls)
        engine.use(llm)
        return engine

    def use(self, llm: LLM) -> None:
        """Read what the model offers, and have results arrive here."""
        self.llm = llm
        self.core = llm.llm_engine
        self.tokenizer = self.llm.get_tokenizer()
        self.spec = ModelSpec.from_plain(common_result(self.llm.collective_rpc("describe_interventions")))
        self.router = ResultRouter(self.spec)
        deliver_payloads(self.core.output_processor, {PLAN_KEY: self.router.deliver})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine, and drop it: a fixture may refer to this object until all tests are over."""
        self.core.engine_core.shutdown()
        del self.llm, self.core

    def token_ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def ask(
        self, prompt: str | list[int], interventions: Interventions | None = None, **options: Any
    ) -> Reply:
        """Run one request alone and return its only choice."""
        (reply,) = self.run([Ask(prompt, interventions or [], **options)])
        return reply[0]

    def run(self, asks: Sequence[Ask]) -> list[list[Reply]]:
        """Run requests together; return the choices of each."""
        return self.finish([self.submit(ask) for ask in asks])

    def finish(self, pending: Sequence[Pending], done: Mapping[str, Any] | None = None) -> list[list[Reply]]:
        """Run to the end, and return the choices of these requests; ``done`` has what ended before."""
        outputs = dict(done or {})
        while self.core.has_unfinished_requests():
            outputs |= self.step()
        return [self.replies(entry, outputs[entry.request_id]) for entry in pending]

    def step(self) -> dict[str, Any]:
        """Run one step, and return by their ids what requests ended with it."""
        return {output.request_id: output for output in self.core.step() if output.finished}

    def submit(self, ask: Ask, tamper: Callable[[SamplingParams], None] | None = None) -> Pending:
        """Queue one request; ``tamper`` may change what the engine is sent."""
        prompt = self.rendered(ask)
        ids, media = prompt["prompt_token_ids"], media_of(prompt)
        options = {"temperature": 0.0, "max_tokens": ask.max_tokens, "ignore_eos": True} | ask.sampling
        kind = RequestOutputKind.DELTA if ask.stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**options, output_kind=kind)
        request_id = uuid.uuid4().hex
        collectors: list[RequestCollector] = []
        salt = ask.cache_salt
        if ask.interventions:
            ops = parse_interventions(ask.interventions, RequestLimits())
            compiled = compile_request(
                ops,
                spec=self.spec,
                prompt_token_ids=ids,
                max_tokens=ask.max_tokens,
                token_of=TokenTexts(self.tokenizer).token,
                stream=ask.stream,
                markers=self.markers,
                media=media,
                prompt_logprobs=params.prompt_logprobs is not None,
            )
            collectors = self.router.open(
                request_id,
                compiled.plan,
                prompt_token_ids=ids,
                op_names=[op.op for op in ops],
                num_choices=params.n,
            )
            prepare_params(params, compiled, request_id)
            salt = salted(compiled, salt, "secret")
        if salt is not None:
            prompt["cache_salt"] = salt
        if tamper is not None:
            tamper(params)
        self.core.add_request(request_id, prompt, params, lora_request=ask.adapter or self.adapter)
        return Pending(request_id, collectors)

    def rendered(self, ask: Ask) -> dict[str, Any]:
        """Return the prompt as vLLM's server passes it to the engine."""
        if not ask.images:
            return {"prompt_token_ids": self.token_ids(ask.prompt)}
        raw = {"prompt": ask.prompt, "multi_modal_data": {"image": list(ask.images)}}
        prompt: dict[str, Any] = self.core.renderer.render_cmpl([raw])[0]
        return prompt

    def submit_broken(self, ask: Ask) -> Pending:
        """Queue a request whose first tensor is swapped for a narrower one behind admission's back."""
        entries: list[Any] = []

        def narrow(params: SamplingParams) -> None:
            entry = (params.extra_args or {})[PLAN_KEY]
            (name,) = entry["tensors"]
            entry["tensors"][name] = ("float32", [3], bytes(12))
            entries.append(entry)

        pending = self.submit(ask, tamper=narrow)
        assert entries
        return pending

    def replies(self, pending: Pending, output: Any) -> list[Reply]:
        self.router.close(pending.request_id)
        replies = []
        for choice in output.outputs:
            collector = pending.collectors[choice.index] if pending.collectors else None
            failure = None if collector is None else collector.failure
            collected = None
            if collector is not None and failure is None:
                collected = collector.take_final(choice.token_ids)
            logprobs = [
                {token: entry.logprob for token, entry in step.items()} for step in choice.logprobs or []
            ]
            replies.append(
                Reply(
                    list(choice.token_ids),
                    choice.text,
                    logprobs,
                    collected,
                    failure,
                    output.num_cached_tokens or 0,
                )
            )
        return replies

    def held(self) -> dict[str, int]:
        """Return what the engine holds for live requests, after one more step has reached its workers."""
        self.ask("a", max_tokens=1)
        self.ask("a", max_tokens=1)
        workers = self.llm.collective_rpc("count_interventions")
        counts = {name: max(one.get(name, 0) for one in workers) for name in set().union(*workers)}
        scheduler = self.core.engine_core.engine_core.scheduler
        return {**counts, "pending": scheduler.num_pending(), "open": len(self.router)}


def small_engine(checkpoint: Path, **options: Any) -> Engine:
    """Load a tiny model in float32."""
    defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "block_size": 32}
    return Engine(checkpoint, **(defaults | options))


@dataclasses.dataclass
class Pending:
    request_id: str
    collectors: list[RequestCollector]
