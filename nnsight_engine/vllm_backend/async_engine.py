"""vLLM's asynchronous engine, extended: ``generate`` runs calls with interventions; it can pause and sleep.

vLLM's serving classes pass nothing of ours to ``generate``: a call is a context variable, see ``carrying``.
Prompts are compiled before anything is streamed, so that an invalid request gets an HTTP status.

Of pauses and sleep, what vLLM would do wrong is refused: a level of sleep that discards the weights or does
nothing, and mode ``abort`` for pooling, which ends vLLM's engine. Nothing wakes an engine while it is to free
memory: vLLM frees it once requests have ended, even if it works again by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeVar

import msgspec
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import PauseMode
from vllm.v1.executor import Executor

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.work_context import EngineCounts, current_work, tenant_served
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.vllm_backend.compat import add_entries
from nnsight_engine.vllm_backend.fair_scheduler import SENDER_KEY
from nnsight_engine.vllm_backend.operations_call import InterventionCall, PromptEntry, prepare_params, salted
from nnsight_engine.vllm_backend.outputs import ResultRouter, count_tokens, deliver_payloads, note_spent
from nnsight_engine.vllm_backend.processes import kill_engine, uninterrupted
from nnsight_engine.vllm_backend.request_parts import TensorTable, media_of, salt_of_adapter
from nnsight_engine.vllm_backend.rpc_results import common_result
from nnsight_engine.vllm_backend.trace_call import TraceCall
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY
from nnsight_engine.vllm_backend.tracing_async_llm import TracingAsyncLLM
from nnsight_engine.vllm_backend.unsupported_options import check_supported

_FREES_MEMORY: Final = 1
_DISCARDS_WEIGHTS: Final = 2
_ABORTED: Final = "abort"


class PauseRefusedError(ApiError, ValueError):
    """A pause that the engine does not support; vLLM's route ``/pause`` answers a ``ValueError`` with 400."""


class _Choice(Protocol):
    finish_reason: str | None


class PausingAsyncLLM(TracingAsyncLLM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pausing = asyncio.Lock()
        self._num_wakes = 0

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop the engine's work; from level 1 on, free memory. Raise PauseRefusedError, nothing done."""
        self._check_level(level, mode)
        self._check_mode(mode)
        if level < _FREES_MEMORY:
            num_wakes = self._num_wakes
            await self._unless_dead(super().sleep(level, mode))
            if self._num_wakes > num_wakes and self.logger_manager is not None:
                # Woken while vLLM waited, which records the sleep only afterwards.
                self.logger_manager.record_sleep_state(0, 0)
            return
        async with self._pausing:
            await self._unless_dead(super().sleep(level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Go on; waits for a sleep under way that frees memory. Returns whether all memory is back."""
        async with self._pausing:
            is_awake: bool = await self._unless_dead(super().wake_up(tags))
            self._num_wakes += is_awake
            return is_awake

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop the engine's work; raise PauseRefusedError, with nothing done."""
        self._check_mode(mode)
        await self._unless_dead(super().pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        async with self._pausing:
            await self._unless_dead(super().resume_generation())
            self._num_wakes += 1

    def _check_level(self, level: int, mode: PauseMode) -> None:
        if level >= _DISCARDS_WEIGHTS:
            raise _refused(
                "Level 2 discards the weights, and needs an exchange of weights, which is not served: send "
                "level=1 or level=0.",
                "level",
            )
        if level < _FREES_MEMORY:
            return
        if not self.model_config.enable_sleep_mode:
            raise _refused(
                "Level 1 frees memory of a GPU, and needs a server that is started with --enable-sleep-mode: "
                "send level=0, which only pauses.",
                "level",
            )
        if mode == "keep":
            raise _refused(
                "Level 1 discards the KV cache and moves the weights, which code of kept requests may hold: "
                "send mode=wait or mode=abort.",
                "mode",
            )

    def _check_mode(self, mode: PauseMode) -> None:
        if mode == _ABORTED and self.model_config.runner_type == "pooling":
            raise _refused(
                "The model embeds or classifies, and vLLM cannot abort such requests, which are short: send "
                "mode=wait or mode=keep.",
                "mode",
            )


def check_not_aborted(choices: Iterable[_Choice]) -> None:
    """Raise ApiError (``engine_paused``) if a request with operations was aborted: it has no results."""
    if any(choice.finish_reason == _ABORTED for choice in choices):
        raise ApiError(
            ErrorCode.ENGINE_PAUSED,
            "The server's operator has paused the engine with mode=abort, which ended this request without "
            "its results; send it again.",
        )


def _refused(message: str, param: str) -> PauseRefusedError:
    return PauseRefusedError(ErrorCode.UNSUPPORTED_COMBINATION, message, param)


logger = logging.getLogger(__name__)

AcceptGrammar = Callable[[StructuredOutputsParams, str], Awaitable[None]]
"""Checks a sender's grammar before it reaches the engine; raises ApiError for an invalid one."""

_Output = TypeVar("_Output", RequestOutput, PoolingRequestOutput)
_SANDBOX_S: Final = 120.0
_SANDBOX_POLL_S: Final = 0.1

_CALL: Final[ContextVar[InterventionCall | TraceCall | None]] = ContextVar(
    "nnsight_engine_call", default=None
)


@contextlib.contextmanager
def carrying(call: InterventionCall | TraceCall) -> Iterator[None]:
    """Have ``generate`` take its prompts as those of a call, in this task and in those that it starts."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


async def _check_grammar(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """Pass outputs on; raise ApiError for finish reason ``error``: the grammar leaves no token."""
    try:
        async for output in outputs:
            if any(choice.finish_reason == "error" for choice in output.outputs):
                raise ApiError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    "No token is left that fits the grammar and whatever else limits tokens: leave out "
                    "`allowed_token_ids`, `bad_words`, `logit_bias` or what steers, or change the grammar.",
                    "structured_outputs",
                )
            yield output
    finally:
        await outputs.aclose()


class InterventionAsyncLLM(PausingAsyncLLM):
    """An ``AsyncLLM`` with interventions; await ``describe`` once before the first request."""

    spec: ModelSpec
    router: ResultRouter
    _accept_grammar: AcceptGrammar | None = None

    @classmethod
    def create(
        cls, config: VllmConfig, *, enable_log_requests: bool, disable_log_stats: bool
    ) -> InterventionAsyncLLM:
        """Start the engine's processes and load the model; blocks until both are done.

        Raises:
            UnsupportedOptionError: An option is set under which interventions could be silently wrong.
        """
        check_supported(config)
        if config.structured_outputs_config.backend == "auto":
            # With "auto" vLLM chooses a backend for each request, but its engine compiles all grammars with
            # the backend of the first. A grammar that only another backend supports would pass the check and
            # fail in the engine.
            config.structured_outputs_config.backend = "xgrammar"
        with uninterrupted():
            return cls(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                usage_context=UsageContext.OPENAI_API_SERVER,
                log_requests=enable_log_requests,
                log_stats=not disable_log_stats,
            )

    async def describe(self) -> ModelSpec:
        """Fetch the model's spec from the workers, and connect results and token counts to the engine."""
        self._run_output_handler()  # else started with the first request; detects the engine's death
        self.spec = ModelSpec.from_plain(common_result(await self.collective_rpc("describe_interventions")))
        self.router = ResultRouter(self.spec)
        handlers = {PLAN_KEY: self.router.deliver, TRACE_KEY: self.traces.deliver}
        deliver_payloads(self.output_processor, handlers)
        count_tokens(self.output_processor)
        self._has_sandbox = False
        self._contents = TensorTable()
        self._salt_secret = secrets.token_hex()
        return self.spec

    async def died(self) -> None:
        """Wait until the engine is dead, as only then the task that handles its outputs ends."""
        if self.output_handler is not None:
            await asyncio.wait({self.output_handler})

    @property
    def num_other_requests(self) -> int:
        """The number of unfinished requests, which blocks may run beside; 0 while no trace is open."""
        return self.get_num_unfinished_requests() if len(self.traces) else 0

    def kill(self) -> None:
        """Kill the engine's processes, whatever they are doing; the engine then counts as dead."""
        kill_engine(self)

    async def prepare_sandbox(self) -> None:
        """Wait for sandboxes, which takes some seconds at first; raise ApiError (``sandbox_missing``)."""
        give_up = time.monotonic() + _SANDBOX_S
        while not self._has_sandbox:
            # Of each engine's workers, one answers.
            answers = [
                result for result in await self.collective_rpc("prepare_sandbox") if result is not None
            ]
            for _, failure in answers:
                if failure is not None:
                    raise ApiError(ErrorCode.SANDBOX_MISSING, failure["message"])
            is_ready = all(is_ready for is_ready, _ in answers)
            if not is_ready and time.monotonic() > give_up:
                raise ApiError(ErrorCode.SANDBOX_MISSING, "The sandbox is still being started; try again.")
            self._has_sandbox = is_ready
            if not is_ready:
                await asyncio.sleep(_SANDBOX_POLL_S)

    def close_call(self, call: InterventionCall | TraceCall) -> None:
        """Remove a call's prompts, including prompts that never ran because another was rejected."""
        if isinstance(call, TraceCall):
            call.close(self.run_in_background)
            return
        note_spent(call.spent_s)
        for entry in call.entries:
            self._close_key(entry.key)

    async def count_events(self) -> EngineCounts:
        """Return the event counts of all engines since their start; an engine answers between two steps."""
        # Of each engine's workers, one has counts.
        answers = [counts for counts in await self.collective_rpc("count_events") if counts]
        return EngineCounts.total(map(EngineCounts.from_plain, answers))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter into all workers of all engines, or into none; see ``hold_adapter``."""
        await self.hold_adapter(lora_request)
        return True

    def _close_key(self, key: str) -> None:
        self.router.close(key)
        self._contents.release(key)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does, with the interventions of the call that the task carries.

        Raises:
            ApiError: The operations do not fit the prompt, the prompt is empty, or the client set one of the
                engine's own keys of ``vllm_xargs``. The call keeps it as its failure, since some of vLLM's
                handlers answer it as an error of their own.
        """
        call = _CALL.get()
        with _noting_failure(call):
            return self._generating(call, prompt, sampling_params, request_id, **kwargs)

    def _generating(
        self,
        call: InterventionCall | TraceCall | None,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Do what ``generate`` says, without noting a failure in the call."""
        extra = sampling_params.extra_args or {}
        sender = tenant_served()
        if isinstance(prompt, dict) and prompt.get("prompt_token_ids") == []:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "Every prompt of a request needs a token, and one of this request's has none: send at least "
                "one character, or one id.",
                "prompt",
            )
        if PLAN_KEY in extra or TRACE_KEY in extra or extra.get(SENDER_KEY, sender) != sender:
            raise ApiError(
                ErrorCode.BAD_REQUEST,
                f"vllm_xargs may not name {PLAN_KEY!r}, {TRACE_KEY!r} or {SENDER_KEY!r}; "
                "send `interventions` instead",
                "vllm_xargs",
            )
        if sender:
            sampling_params.extra_args = {**extra, SENDER_KEY: sender}
        adapter = kwargs.get("lora_request")
        prompt = self._adapted(prompt, adapter)
        if isinstance(call, TraceCall):
            _token_ids(prompt)  # raises for embeddings, which have no token positions
            kwargs.pop("lora_request", None)
            traced = call.begin(self, prompt, sampling_params, request_id, adapter)
            outputs = traced.outputs(**kwargs)
        elif call is None:
            outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        else:
            entry, prompt = self._planned(call, prompt, sampling_params, sampling_params.n)
            cumulative = sampling_params.output_kind is not RequestOutputKind.DELTA

            def deliver(output: RequestOutput) -> None:
                check_not_aborted(output.outputs)
                entry.deliver(output.outputs, cumulative=cumulative)

            outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
            outputs = _watched(call, entry, outputs, deliver)
        return outputs if sampling_params.structured_outputs is None else _check_grammar(outputs)

    def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool as vLLM does, see ``generate``."""
        call, sender = _CALL.get(), tenant_served()
        params = pooling_params.clone()  # vLLM gives one object to all prompts of a request
        if sender:
            add_entries(params, {SENDER_KEY: sender})
        if isinstance(call, TraceCall):
            call.failure = ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "Code runs beside a request that generates, and this one is embedded; send operations.",
                call.param,
            )
            raise call.failure
        pooled: AsyncGenerator[PoolingRequestOutput, None]
        with _noting_failure(call):
            prompt = self._adapted(prompt, kwargs.get("lora_request"))
        if call is None:
            pooled = super().encode(prompt, params, request_id, **kwargs)
            return pooled
        with _noting_failure(call):
            entry, prompt = self._planned(call, prompt, params, 1)
        pooled = super().encode(prompt, params, request_id, **kwargs)
        return _watched(call, entry, pooled, lambda _: None)

    def _adapted(self, prompt: Any, adapter: LoRARequest | None) -> Any:
        """Return the prompt with the cache salt of its LoRA adapter, see ``salt_of_adapter``."""
        if adapter is None:
            return prompt
        salt = salt_of_adapter(adapter, prompt.get("cache_salt"), self._salt_secret)
        return {**prompt, "cache_salt": salt}

    def _planned(
        self, call: InterventionCall, prompt: Any, params: SamplingParams | PoolingParams, num_choices: int
    ) -> tuple[PromptEntry, Any]:
        """Compile a call's next prompt, and open its results; return its entry and the salted prompt."""
        prompt_token_ids, media = _token_ids(prompt), media_of(prompt)
        compiled = call.compile(prompt_token_ids, media, params)
        key = uuid.uuid4().hex
        op_names = call.op_names(len(call.entries))
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_key, key)
            compiled = msgspec.structs.replace(
                compiled, tensors=self._contents.acquire(key, compiled.tensors)
            )
            collectors = self.router.open(
                key,
                compiled.plan,
                prompt_token_ids=prompt_token_ids,
                op_names=op_names,
                num_choices=num_choices,
            )
            entry = PromptEntry(key, compiled, collectors, [[] for _ in collectors], media)
            call.entries.append(entry)
            undo.pop_all()  # from here on ``close_call`` closes it
        prepare_params(params, compiled, key)
        salt = salted(compiled, prompt.get("cache_salt"), self._salt_secret)
        return entry, prompt if salt is None else {**prompt, "cache_salt": salt}

    def accept_grammars(self, accept: AcceptGrammar) -> None:
        """Have ``accept`` check each grammar before its request is added, in place of vLLM's own check."""
        self._accept_grammar = accept
        # Without this config vLLM skips its own check.
        self.input_processor.structured_outputs_config = None

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, *args: Any, **kwargs: Any
    ) -> Any:
        """Add a request as vLLM does, once its grammar is accepted, with its HTTP request's trace headers."""
        structured = params.structured_outputs if isinstance(params, SamplingParams) else None
        if structured is not None and self._accept_grammar is not None:
            await self._accept_grammar(structured, tenant_served())
        work = current_work()
        if work is not None and work.trace_headers is not None:
            kwargs["trace_headers"] = work.trace_headers
        return await super().add_request(request_id, prompt, params, *args, **kwargs)


@contextlib.contextmanager
def _noting_failure(call: InterventionCall | TraceCall | None) -> Iterator[None]:
    """Keep an ApiError that the block raises as the call's failure."""
    try:
        yield
    except ApiError as error:
        if call is not None:
            call.failure = error
        raise


async def _watched(
    call: InterventionCall,
    entry: PromptEntry,
    outputs: AsyncGenerator[_Output, None],
    deliver: Callable[[_Output], None],
) -> AsyncGenerator[_Output, None]:
    """Pass outputs on, each after ``deliver``; raise the failure that the engine reported for the prompt."""
    try:
        with _noting_failure(call):
            async for output in outputs:
                entry.raise_failure()
                deliver(output)
                yield output
    finally:
        await outputs.aclose()


def _token_ids(prompt: Any) -> list[int]:
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not token_ids:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "interventions need a prompt of tokens, and this one is given as embeddings; send text or ids",
            "prompt",
        )
    return list(token_ids)
