"""An API call whose ``interventions`` are a trace: its block runs together with each of the prompts."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.plans.collect.results import CollectedResults, CollectedTrace
from nnsight_engine.remote_backend.saved_deltas import MALFORMED
from nnsight_engine.vllm_backend.json_values import NotPlainError
from nnsight_engine.vllm_backend.request_parts import media_of
from nnsight_engine.vllm_backend.running_trace import TraceRequests, TraceRun
from nnsight_engine.vllm_backend.trace_results import (
    MAX_DELTA_BYTES,
    BlockError,
    ChoiceValues,
    read_results,
)
from nnsight_engine.vllm_backend.traces.context import TraceEntry

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

    from nnsight_engine.plans.request_plan import Spans
    from nnsight_engine.remote_backend.unread_output import SlowReaderError
    from nnsight_engine.vllm_backend.running_trace import FinishedTrace, TraceEvent, TraceHost

_SLOW_BYTES: Final = 2**20
_MAX_BYTES: Final = 4 * 2**30


class HeldSlot(Protocol):
    async def wait_granted(self) -> None: ...

    def release(self) -> None:
        """Release the slot, or stop waiting for it; idempotent."""


class _NoSlot:
    async def wait_granted(self) -> None:
        pass

    def release(self) -> None:
        pass


class TracedPrompt(TraceRun):
    """One prompt: a trace of one request, whose slot is released when the worker has dropped it."""

    def __init__(
        self,
        call: TraceCall,
        engine: TraceHost,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        adapter: LoRARequest | None,
    ) -> None:
        """Prepare a prompt's requests, one for each choice; nothing runs before ``outputs`` is read."""
        key = uuid.uuid4().hex
        # Several choices are several requests in the engine: the worker gets the block once, before them.
        has_choices = params.n > 1
        requests = TraceRequests(key, call.data if has_choices else None)
        entry = TraceEntry(
            key, index=0, num_choices=params.n, data=b"" if has_choices else call.data, groups=[{}],
            streams=call.streams, prints=True, plain=True, sandbox_of=call.sandbox_of,
        )  # fmt: skip
        requests.add(prompt, params, entry, request_id=request_id, adapter=adapter)
        super().__init__(engine, requests, max_pending_bytes=MAX_DELTA_BYTES)
        self.choices = [ChoiceValues() for _ in range(params.n)]
        self.slot = call.slot()
        self.tier = ""
        self.images = media_of(prompt).images
        self._call = call

    async def outputs(self, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs, the last one once the block's results are read; raise ApiError if it failed."""
        await self.slot.wait_granted()
        await self.begin()
        outputs = self.start(0, **options)
        try:
            async for output in outputs:
                self.gathered[0].add(output)
                if output.finished:
                    finished = await self.finish()
                    self.tier = finished.tier
                    self.slot.release()
                    await asyncio.to_thread(self.read_results, finished)
                yield output
        except ApiError as error:
            self._call.failure = error
            raise
        finally:
            await outputs.aclose()

    async def end(self) -> None:
        try:
            await super().end()
        finally:
            self.slot.release()

    def add_event(self, event: TraceEvent) -> None:
        self.share.add(self.choices[event.choice].add_event(event))

    def drop_events(self, _error: SlowReaderError) -> None:
        """Drop the pending values of all choices; the last chunk contains everything."""
        for choice in self.choices:
            choice.drop()

    async def take_deltas(self, choice: ChoiceValues) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the new data of a choice; raise ApiError (``trace_failed``) if it cannot be decoded."""
        num_bytes = choice.num_pending
        self.share.take(num_bytes)
        unread = choice.take_unread()
        with self._reading():
            if num_bytes < _SLOW_BYTES:
                return choice.read(unread, self._call.max_bytes)
            return await asyncio.to_thread(choice.read, unread, self._call.max_bytes)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise errors of malformed values as ApiError; a sandbox process may have sent anything."""
        try:
            yield
        except MALFORMED as error:
            raise ApiError(
                ErrorCode.TRACE_FAILED,
                f"The values that the trace saved cannot be read: {error}. Only this request has failed.",
                self._call.param,
            ) from error

    def read_results(self, finished: FinishedTrace) -> None:
        """Decode the results of the block, on a thread since it may be slow; raise ApiError if it failed."""
        with self._reading():
            blocks = read_results(finished.data, finished.results, len(self.choices))
        for block in blocks:
            if block.error is not None:
                raise self._call.failed(block.error, has_begun=finished.has_begun)
            choice = self.choices[block.choice]
            choice.warnings = block.warnings
            try:
                choice.set_saves(block.saves, self._call.max_bytes)
            except NotPlainError as error:
                raise ApiError(ErrorCode.TRACE_FAILED, str(error), self._call.param) from error
        if any(choice.saves is None for choice in self.choices):
            raise ApiError(
                ErrorCode.INTERVENTION_FAILED,
                "The engine returned no results of the trace: too many waited to be collected. Send it "
                "again.",
                self._call.param,
            )
        self.choices[0].printed.append(finished.printed)


class TraceCall:
    """A call with a trace, limited in requests (choices of all prompts) and in saved bytes of one choice.

    ``sandbox_of`` is the tenant in whose sandbox the block runs; None to run it in the worker, as
    trusted code. ``slot`` requests a slot for a prompt, and raises ApiError if too many are waiting.
    """

    slot: Callable[[], HeldSlot] = _NoSlot

    def __init__(
        self,
        data: bytes,
        *,
        name: str,
        param: str,
        filename: str,
        streams: bool,
        max_requests: int,
        sandbox_of: str | None,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        """Take an encoded trace; ``name`` is that of its results, ``param`` its field's in errors."""
        self.max_bytes = max_bytes
        self.data = data
        self.param = param
        self.streams = streams
        self.sandbox_of = sandbox_of
        self.failure: ApiError | None = None
        self.prompts: list[TracedPrompt] = []
        self._name = name
        self._filename = filename
        self._max_requests = max_requests
        self._num_requests = 0

    def begin(
        self,
        engine: TraceHost,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        adapter: LoRARequest | None = None,
    ) -> TracedPrompt:
        """Return the next prompt, which waits for its slot.

        Raises:
            ApiError: Too many requests, or several streamed choices; ``queue_full`` if no slot can be waited
                for.
        """
        self._num_requests += params.n
        if self._num_requests > self._max_requests:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A request with a trace may have {self._max_requests} choices, those of all its prompts "
                "together; send fewer prompts, or a smaller `n`.",
                self.param,
            )
        if self.streams and params.n > 1:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"A stream with a trace has one choice for each prompt, got `n` {params.n}: the values that "
                "a choice saved are collected when all choices of its prompt have ended.",
                "n",
            )
        traced = TracedPrompt(self, engine, prompt, params, request_id, adapter)
        self.prompts.append(traced)
        return traced

    def close(self, run_in_background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """End all prompts, those that never ran included."""
        for prompt in self.prompts:
            prompt.stop_events()
            if prompt.is_running:
                run_in_background(prompt.end())
            else:
                prompt.slot.release()

    async def take_part(self, choice: int, num_choices: int) -> CollectedResults | None:
        """Return a choice's new results, or None; raise ApiError (``trace_failed``) if they are malformed."""
        prompt, sent_choice = self._choice(choice, num_choices)
        saves, grown = await prompt.take_deltas(sent_choice)
        printed = sent_choice.take_printed()
        if not (saves or grown or printed):
            return None
        return CollectedResults([CollectedTrace(self._name, saves, grown, printed)], final=False)

    def take_final(self, choice: int, num_choices: int) -> CollectedResults:
        """Return all results of a choice, which has ended."""
        prompt, sent_choice = self._choice(choice, num_choices)
        result = CollectedTrace(
            self._name, sent_choice.saves or {}, {}, sent_choice.take_printed(), sent_choice.warnings
        )
        return CollectedResults([result], is_code=True, tier=prompt.tier)

    def images(self, choice: int, num_choices: int) -> tuple[Spans, ...]:
        prompt, _ = self._choice(choice, num_choices)
        return prompt.images

    def failed(self, error: BlockError, *, has_begun: bool) -> ApiError:
        """Return a block's error for the client; without ``has_begun``, the trace may be sent again."""
        if not has_begun:
            return ApiError(ErrorCode.QUEUE_FULL, f"The trace did not begin: {error.message}", self.param)
        return ApiError(
            ErrorCode.TRACE_FAILED, f"The trace failed{error.description(self._filename)}", self.param
        )

    def _choice(self, choice: int, num_choices: int) -> tuple[TracedPrompt, ChoiceValues]:
        # vLLM numbers choices prompt by prompt.
        number, index = divmod(choice, num_choices)
        prompt = self.prompts[number]
        return prompt, prompt.choices[index]
