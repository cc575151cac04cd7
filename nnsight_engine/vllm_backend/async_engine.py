"""vLLM's asynchronous engine, extended so that ``generate`` runs calls with interventions.

vLLM's serving classes call ``generate`` once per prompt. A call with interventions is recognised by its
ticket. Its prompt is compiled in ``generate``, before anything is streamed, so that an invalid request is
rejected with an HTTP status instead of an error inside the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.engine_counts import EngineCounts
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.work_context import current_work, tenant_served
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.vllm_backend.call import (
    TICKET_KEY,
    InterventionCall,
    PromptEntry,
    prepare_params,
    salted,
)
from nnsight_engine.vllm_backend.compat import check_supported
from nnsight_engine.vllm_backend.metering import count_tokens, note_spent
from nnsight_engine.vllm_backend.output_payloads import deliver_payloads
from nnsight_engine.vllm_backend.processes import kill_engine, uninterrupted
from nnsight_engine.vllm_backend.result_router import ResultRouter
from nnsight_engine.vllm_backend.rpc_results import PENDING, answer
from nnsight_engine.vllm_backend.sender_usage import SENDER_KEY
from nnsight_engine.vllm_backend.shared_memory_results import SharedMemoryResults
from nnsight_engine.vllm_backend.tensor_interning import TensorTable
from nnsight_engine.vllm_backend.trace_call import TraceCall, TracedPrompt
from nnsight_engine.vllm_backend.trace_results import MAX_DELTA_BYTES
from nnsight_engine.vllm_backend.trace_router import TraceRouter
from nnsight_engine.vllm_backend.traced_requests import GatheredOutput, carry, results_of, with_own_salt
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY

logger = logging.getLogger(__name__)

AcceptGrammar = Callable[[StructuredOutputsParams, str], Awaitable[None]]
"""Checks a sender's grammar before it reaches the engine; raises ApiError for an invalid one."""

_SANDBOX_S: Final = 120.0
_SANDBOX_LOOK_S: Final = 0.1
_COLLECT_LOOK_S: Final = 0.02


class FinishedTrace(NamedTuple):
    """The results of a trace that has ended.

    Attributes:
        data: The encoded values that its blocks saved and the errors they raised, see ``outcomes``.
        printed: Printed text that has not been streamed yet.
        failure: One line about how a block failed; empty if none did.
        spent_s: Seconds for which the engine waited for the trace.
        tier: How its steps ran: ``tap``, or ``eager`` if at least one of them had to run uncompiled.
    """

    data: bytes | memoryview
    printed: str
    failure: str
    spent_s: float
    tier: str


async def _check_grammar(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """Yield a request's outputs.

    Raises:
        ApiError: vLLM ended the request because no token fits its grammar.
    """
    try:
        async for output in outputs:
            if any(one.finish_reason == "error" for one in output.outputs):
                raise ApiError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    "No token is left that fits the grammar and whatever else limits tokens: leave out "
                    "`allowed_token_ids`, `bad_words`, `logit_bias` or what steers, or change the grammar.",
                    "structured_outputs",
                )
            yield output
    finally:
        await outputs.aclose()


class InterventionAsyncLLM(AsyncLLM):
    """An ``AsyncLLM`` with interventions; await ``describe`` once before the first request.

    Attributes:
        handover: Transfers large trace results from the workers through files in memory; None to use only
            vLLM's RPC.
    """

    spec: ModelSpec
    router: ResultRouter
    traces: TraceRouter
    handover: SharedMemoryResults | None = None
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
        """Fetch the model's description from the worker and start routing results."""
        self._run_output_handler()  # else started with the first request; detects the engine's death
        (plain, *_) = await self.collective_rpc("describe_interventions")
        self.spec = ModelSpec.from_plain(plain)
        self.router = ResultRouter(self.spec)
        self.traces = TraceRouter()
        handlers = {PLAN_KEY: self.router.deliver, TRACE_KEY: self.traces.deliver}
        deliver_payloads(self.output_processor, handlers)
        count_tokens(self.output_processor)
        self._has_sandbox = False
        self._coming: dict[str, Callable[[], None]] = {}
        self._calls: dict[str, InterventionCall | TraceCall] = {}
        self._left: set[asyncio.Future[None]] = set()
        self._contents = TensorTable()
        self._salt_secret = secrets.token_hex()
        return self.spec

    async def died(self) -> None:
        """Wait until the engine has died or been shut down."""
        if self.output_handler is not None:
            await asyncio.wait({self.output_handler})

    @property
    def num_other_requests(self) -> int:
        """The number of unfinished requests, which blocks may run beside; 0 while no trace is open."""
        return self.get_num_unfinished_requests() if len(self.traces) else 0

    def kill(self) -> None:
        """Kill the engine's processes, whatever they are doing; the engine then counts as dead."""
        kill_engine(self)

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all workers, and fail if the engine dies meanwhile; vLLM's own would never return.

        Raises:
            EngineDeadError: The engine has died.
        """
        task = asyncio.ensure_future(super().collective_rpc(*args, **kwargs))
        waited_for: set[asyncio.Future[Any]] = {task}
        if self.output_handler is not None:
            waited_for.add(self.output_handler)
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDeadError
            answers: list[Any] = task.result()
            return answers
        finally:
            task.cancel()

    async def prepare_sandbox(self) -> None:
        """Wait until sandboxes for untrusted code are available; the first call takes some seconds.

        Raises:
            ApiError: ``sandbox_missing``: this machine or this model supports none, or they did not start in
                time.
        """
        give_up = time.monotonic() + _SANDBOX_S
        while not self._has_sandbox:
            is_ready, failure = answer(await self.collective_rpc("prepare_sandbox"))
            if failure is not None:
                raise ApiError(ErrorCode.SANDBOX_MISSING, failure["message"])
            if not is_ready and time.monotonic() > give_up:
                raise ApiError(ErrorCode.SANDBOX_MISSING, "The sandbox is still being started; try again.")
            self._has_sandbox = is_ready
            if not is_ready:
                await asyncio.sleep(_SANDBOX_LOOK_S)

    def open_call(self, call: InterventionCall | TraceCall) -> None:
        """Register a call under its ticket; the caller must ``close_call`` it."""
        self._calls[call.ticket] = call

    def close_call(self, call: InterventionCall | TraceCall) -> None:
        """Remove a call and its prompts, including prompts that never ran because another was rejected."""
        self._calls.pop(call.ticket, None)
        if isinstance(call, TraceCall):
            for traced in call.prompts:
                self.traces.close(traced.key)
                if traced.has_begun and not traced.is_over:
                    self._leave(self._forget_prompt(traced))
                else:
                    traced.slot.release()
            return
        note_spent(call.spent_s)
        for entry in call.entries:
            self._close_key(entry.key)

    async def finish_trace(self, key: str, results: dict[str, Any]) -> FinishedTrace:
        """End a trace whose requests have ended, and return its results.

        Args:
            key: The trace.
            results: Results of its requests, see ``results_of``.
        """
        path = None if self.handover is None else self.handover.path(key)
        arguments = (key, results, path)
        result: Any = PENDING
        while result == PENDING:  # its blocks are still running; the engine serves others meanwhile
            result = answer(await self.collective_rpc("finish_trace", args=arguments))
            await asyncio.sleep(_COLLECT_LOOK_S if result == PENDING else 0)
        data, printed, failure, spent_s, tier = result
        if data is None and self.handover is not None:
            data = self.handover.take(key)
        note_spent(spent_s)
        return FinishedTrace(data, printed, failure, spent_s, tier)

    async def count_events(self) -> EngineCounts:
        """Return the engine's event counts since its start; the engine answers between two steps."""
        return EngineCounts.from_plain(answer(await self.collective_rpc("count_events")))

    async def forget_trace(self, key: str, request_ids: Sequence[str]) -> None:
        """Abort the requests of a trace and drop its state in the engine; never raises."""
        try:
            # When a caller is cancelled, vLLM aborts its request only if the caller was waiting for outputs.
            await self.abort(request_ids)
            note_spent(answer(await self.collective_rpc("drop_trace", args=(key,))))
            if self.handover is not None:  # the file of a result that was not collected
                self.handover.forget(key)
        except EngineDeadError:
            return
        except Exception:
            logger.exception("closing a trace in the engine failed")

    async def _forget_prompt(self, traced: TracedPrompt) -> None:
        try:
            await self.forget_trace(traced.key, [traced.request_id])
        finally:
            traced.slot.release()

    def _leave(self, doing: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; the request's meter waits for it."""
        task = asyncio.ensure_future(doing)
        work = current_work()
        if work is not None:
            work.meter.expect(task)
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _close_key(self, key: str) -> None:
        self.router.close(key)
        self._contents.release(key)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does, with interventions if the parameters carry a ticket.

        Raises:
            ApiError: The call's operations do not fit this prompt, the prompt is empty, or the client set one
                of the engine's own keys of ``vllm_xargs``.
        """
        extra = sampling_params.extra_args or {}
        ticket = extra.get(TICKET_KEY)
        call = self._calls.get(ticket) if isinstance(ticket, str) else None
        sender = tenant_served()
        if isinstance(prompt, dict) and prompt.get("prompt_token_ids") == []:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "Every prompt of a request needs a token, and one of this request's has none: send at least "
                "one character, or one id.",
                "prompt",
            )
        forged = PLAN_KEY in extra or TRACE_KEY in extra or extra.get(SENDER_KEY, sender) != sender
        if forged or (ticket is not None and call is None):
            raise ApiError(
                ErrorCode.BAD_REQUEST,
                f"vllm_xargs may not name {PLAN_KEY!r}, {TRACE_KEY!r}, {SENDER_KEY!r} or {TICKET_KEY!r}; "
                "send `interventions` instead",
                "vllm_xargs",
            )
        if sender:
            sampling_params.extra_args = {**extra, SENDER_KEY: sender}
        if isinstance(call, TraceCall):
            _token_ids(prompt)  # raises for embeddings, which have no token positions
            traced = call.begin(request_id, sampling_params.n)
            outputs = self._generate_with_trace(call, traced, prompt, sampling_params, **kwargs)
        elif call is None:
            outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        else:
            outputs = self._generate_with_plan(call, prompt, sampling_params, request_id, **kwargs)
        return outputs if sampling_params.structured_outputs is None else _check_grammar(outputs)

    def _generate_with_plan(
        self,
        call: InterventionCall,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Compile a request's operations for a prompt and generate; raises ApiError if they are invalid."""
        prompt_token_ids = _token_ids(prompt)
        compiled = call.compile(prompt_token_ids, sampling_params)
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
                num_choices=sampling_params.n,
            )
            entry = PromptEntry(key, compiled, collectors, [[] for _ in collectors])
            call.entries.append(entry)
            undo.pop_all()  # from here on ``close_call`` closes it
        prepare_params(sampling_params, compiled, key)
        salt = salted(compiled, prompt.get("cache_salt"), self._salt_secret)
        if salt is not None:
            prompt = {**prompt, "cache_salt": salt}
        return self._generate(call, entry, prompt, sampling_params, request_id, **kwargs)

    async def generate_traced(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, come: Callable[[], None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for a request of a trace, whose entry the server has put into the parameters.

        Args:
            prompt: vLLM's prompt.
            sampling_params: vLLM's sampling parameters.
            request_id: A unique id.
            come: Called once the engine has received the request.
        """
        self._coming[request_id] = come
        outputs = super().generate(prompt, sampling_params, request_id)
        try:
            async for output in outputs:
                yield output
        finally:
            self._coming.pop(request_id, None)
            await outputs.aclose()

    def accept_grammars(self, accept: AcceptGrammar) -> None:
        """Check every grammar with ``accept`` before it reaches the engine, in place of vLLM's own checks."""
        self._accept_grammar = accept
        # Without this config vLLM skips its own check.
        self.input_processor.structured_outputs_config = None

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, *args: Any, **kwargs: Any
    ) -> Any:
        """Send a request to the engine as vLLM does, with its grammar checked first.

        Afterwards calls the ``come`` callback of a request made by ``generate_traced``.
        """
        structured = params.structured_outputs if isinstance(params, SamplingParams) else None
        if structured is not None and self._accept_grammar is not None:
            await self._accept_grammar(structured, tenant_served())
        work = current_work()
        if work is not None and work.trace_headers is not None:
            kwargs["trace_headers"] = work.trace_headers
        queue = await super().add_request(request_id, prompt, params, *args, **kwargs)
        come = self._coming.pop(request_id, None)
        if come is not None:
            come()
        return queue

    async def _generate(
        self,
        call: InterventionCall,
        entry: PromptEntry,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        cumulative = sampling_params.output_kind is not RequestOutputKind.DELTA
        outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        try:
            async for output in outputs:
                entry.raise_failure()
                entry.deliver(output.outputs, cumulative=cumulative)
                yield output
        except ApiError as error:
            call.failure = error
            raise
        finally:
            await outputs.aclose()

    async def _generate_with_trace(
        self,
        call: TraceCall,
        traced: TracedPrompt,
        prompt: Any,
        sampling_params: SamplingParams,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for a request with a trace's block; yield the last output once the trace is collected."""
        entry = traced.entry()
        await traced.slot.wait_granted()
        traced.has_begun = True
        if not entry.data:
            await self.collective_rpc("hold_trace", args=(traced.key, call.data))
        carry(sampling_params, entry)
        traced.share = self.traces.open(traced.key, traced.add_event, traced.drop, max_bytes=MAX_DELTA_BYTES)
        gathered = GatheredOutput(is_delta=sampling_params.output_kind is RequestOutputKind.DELTA)
        outputs = super().generate(with_own_salt(prompt, entry), sampling_params, traced.request_id, **kwargs)
        try:
            async for output in outputs:
                gathered.add(output)
                if output.finished:
                    await self._collect(traced, gathered.output)
                yield output
        except ApiError as error:
            call.failure = error
            raise
        finally:
            await outputs.aclose()

    async def _collect(self, traced: TracedPrompt, output: RequestOutput) -> None:
        results = results_of({0: output})
        finished = await self.finish_trace(traced.key, results)
        traced.is_over, traced.tier = True, finished.tier
        traced.slot.release()
        await asyncio.to_thread(traced.finish, finished.data, finished.printed, output)


def _token_ids(prompt: Any) -> list[int]:
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not token_ids:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "interventions need a prompt of tokens, and this one is given as embeddings; send text or ids",
            "prompt",
        )
    return list(token_ids)
