"""The engines behind ``VLLM``: vLLM's blocking engine, or its asynchronous one on an event loop of its own.

``AsyncLLM`` is bound to its loop, but a user's loop may be short-lived, and a trace may run on a thread
without one. So the engine's loop has a thread of its own; items pass one by one to the user's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from vllm import LLM, AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from api_schemas.errors import ApiError
from nnsight_engine.vllm_backend.outputs import deliver_payloads
from nnsight_engine.vllm_backend.request_parts import AdapterHolds, cache_media_once_sent, check_loaded
from nnsight_engine.vllm_backend.rpc_results import common_result
from nnsight_engine.vllm_backend.running_trace import MergedRun, TraceRequests, results_of
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY
from nnsight_engine.vllm_backend.tracing_async_llm import TracingAsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLEANUP_S: Final = 5.0


class SyncEngine:
    """``vllm.LLM``; threads take turns, failed runs are aborted, and outputs are matched by request id.

    Reason: ``LLM.generate`` steps until no request is left, and returns all outputs, of interrupted calls and
    other threads too.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.inner = LLM(**arguments)
        cache_media_once_sent(self.inner.llm_engine)
        self._turn = threading.RLock()  # vLLM's client of the engine's process is not thread-safe
        lora = self.inner.llm_engine.vllm_config.lora_config
        self._adapters = AdapterHolds(0 if lora is None else lora.max_cpu_loras)

    @property
    def tokenizer(self) -> Any:
        return self.inner.get_tokenizer()

    def call(self, method: str, *args: Any) -> list[Any]:
        with self._turn:
            answers: list[Any] = self.inner.collective_rpc(method, args=args)
        return answers

    def run_trace(self, requests: TraceRequests) -> tuple[bytes | memoryview, list[RequestOutput]]:
        """Run a trace; return its encoded results and its requests' outputs. Workers drop one that fails."""
        try:
            outputs = self.run(requests.prompts, requests.params, requests.adapters)
            results = results_of(dict(enumerate(outputs)))
            return common_result(self.call("collect_trace", requests.key, results)), outputs
        except BaseException:
            self.call("drop_trace", requests.key)
            raise

    def run(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Run requests, and return the output of each; abort them if one fails or the run is interrupted."""
        with self._turn, contextlib.ExitStack() as holds:
            for adapter in filter(None, adapters or ()):
                self._hold_adapter(adapter)
                holds.callback(self._adapters.release, adapter.lora_int_id)
            unfinished_before = self._unfinished()
            try:
                return self._outputs_of(
                    self.inner.enqueue(prompts, params, lora_request=adapters, use_tqdm=False)
                )
            except BaseException:
                self._abort(self._unfinished() - unfinished_before)
                raise

    def _hold_adapter(self, adapter: LoRARequest) -> None:
        """Have the workers load a LoRA adapter if they lack it, and count one more holder; raise ApiError."""
        number = adapter.lora_int_id
        if self._adapters.hold(number):
            return
        for unused in self._adapters.pop_unused():
            self.call("remove_lora", unused)
        try:
            check_loaded(adapter, self.call("load_adapter", adapter.lora_name, number, adapter.lora_path))
        except ApiError:
            self.call("remove_lora", number)
            raise
        self._adapters.add(number)
        self._adapters.hold(number)

    def _outputs_of(self, internal_ids: Sequence[str]) -> list[RequestOutput]:
        """Wait until no request is left, and return the outputs of these, in their order."""
        finished = {
            output.request_id: output
            for output in self.inner.wait_for_completion(RequestOutput, use_tqdm=False)
        }
        # Outputs carry the id without the random characters that vLLM appends to it.
        return [finished[internal_id.split("-")[0]] for internal_id in internal_ids]

    def _unfinished(self) -> set[str]:
        """Return the internal ids of the unfinished requests; the parent's id for several choices."""
        states = self.inner.llm_engine.output_processor.request_states.values()
        return {
            state.request_id if state.parent_req is None else state.parent_req.request_id for state in states
        }

    def _abort(self, internal_ids: set[str]) -> None:
        """Abort requests; never raises, so that the error of the run is not hidden."""
        try:
            self.inner.llm_engine.abort_request(list(internal_ids), internal=True)
        except Exception:
            logger.exception("unfinished requests could not be aborted")

    def close(self) -> None:
        self.inner.llm_engine.engine_core.shutdown()


class AsyncEngine:
    """``AsyncLLM`` on an event loop of its own: requests are streamed."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine, on an event loop that runs in a thread of its own."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nnsight-engine", daemon=True)
        self._thread.start()
        try:
            self.inner = self._wait(self._started(arguments))
            deliver_payloads(self.inner.output_processor, {TRACE_KEY: self.inner.traces.deliver})
        except BaseException:
            self._end_loop()
            raise

    @staticmethod
    async def _started(arguments: Mapping[str, Any]) -> TracingAsyncLLM:
        engine_args = AsyncEngineArgs(**{"disable_log_stats": True, **arguments})
        engine = TracingAsyncLLM.from_engine_args(engine_args)
        assert isinstance(engine, TracingAsyncLLM)  # noqa: S101 - a classmethod that returns its own class
        return engine

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and return its result; the calling thread, another, blocks."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the engine's own loop would wait for itself")
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(_run_for, result, coroutine)
            return result.result()
        except BaseException:
            result.cancel()  # on an interrupt, which may come at any point of this block, it is still running
            raise

    @property
    def tokenizer(self) -> Any:
        return self.inner.get_tokenizer()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all workers, and return the result of each; not on the engine's own loop."""
        return self._wait(self.inner.collective_rpc(method, args=args))

    def run_trace(self, requests: TraceRequests) -> tuple[bytes | memoryview, list[RequestOutput]]:
        """Run a trace, and return its encoded results and its requests' outputs; not on the engine's loop."""
        return self._wait(self._ran(requests))

    async def _ran(self, requests: TraceRequests) -> tuple[bytes | memoryview, list[RequestOutput]]:
        """Do what ``run_trace`` says, on the engine's loop; the outputs are not streamed."""
        for params in requests.params:
            params.output_kind = RequestOutputKind.FINAL_ONLY
        async with MergedRun(self.inner, requests) as run:
            async for _ in run:
                pass
            finished = await run.finish()
        return finished.data, [gathered.output for gathered in run.gathered]

    async def across(self, generator: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Iterate, on the caller's loop, over a generator that runs on the engine's loop."""
        turn = asyncio.Lock()  # on the engine's loop: a cancelled step must end before ``aclose``
        try:
            while True:
                has_item, item = await self._on_engine_loop(_next_item(generator, turn))
                if not has_item:
                    return
                yield item
        finally:
            # Shielded: the generator must be closed in the engine even if the caller is being cancelled.
            await asyncio.shield(self._on_engine_loop(_close(generator, turn)))

    def _on_engine_loop(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        self._wait(self._stop_reading())
        self.inner.shutdown()
        self._end_loop()

    async def _stop_reading(self) -> None:
        """Cancel the task that reads the engine's outputs, as it would report the shutdown as a crash."""
        reader = self.inner.output_handler
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _end_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLEANUP_S)


def _run_for(result: concurrent.futures.Future[T], coroutine: Coroutine[Any, Any, T]) -> None:
    """Run a coroutine as a task on this thread's loop until ``result`` is cancelled, and set its outcome.

    ``asyncio.run_coroutine_threadsafe`` may start the task before an interrupted caller has its future.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(coroutine)

    def hand_over(_: object) -> None:
        if not result.set_running_or_notify_cancel():
            return
        if task.cancelled():
            result.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(task.result())

    def end(_: object) -> None:
        if result.cancelled():
            loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(hand_over)
    result.add_done_callback(end)


async def _next_item(generator: AsyncGenerator[T, None], turn: asyncio.Lock) -> tuple[bool, Any]:
    """Return True and the next item, or False and None at the end."""
    async with turn:
        try:
            return True, await anext(generator)
        except StopAsyncIteration:
            return False, None


async def _close(generator: AsyncGenerator[Any, None], turn: asyncio.Lock) -> None:
    async with turn:
        await generator.aclose()
