"""vLLM's asynchronous engine with the requests of traces; several engines with ``--data-parallel-size``.

The state of a trace is in the workers of one engine, so all its requests are placed there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from api_schemas.errors import ApiError
from nnsight_engine.core.work_context import current_work
from nnsight_engine.vllm_backend.outputs import note_spent
from nnsight_engine.vllm_backend.request_parts import AdapterHolds, cache_media_once_sent, check_loaded
from nnsight_engine.vllm_backend.rpc_results import PENDING, SharedMemoryResults, common_result
from nnsight_engine.vllm_backend.running_trace import FinishedTrace, TraceRouter
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY


class TracePlacement:
    """The engine on which each trace is, and the number of traced requests on each engine."""

    def __init__(self, num_engines: int) -> None:
        self._num_requests = [0] * num_engines
        self._placed: dict[str, tuple[int, int]] = {}
        self._next_engine = 0

    def place(self, key: str, num_requests: int, in_flight: Sequence[int]) -> None:
        """Place a trace on the engine with the fewest requests, by ``in_flight``; equal ones take turns."""
        num_engines = len(self._num_requests)
        in_turn = [(self._next_engine + engine) % num_engines for engine in range(num_engines)]
        # A request is in one of the counts before it is sent, and in both afterwards.
        rank = min(in_turn, key=lambda engine: max(in_flight[engine], self._num_requests[engine]))
        self._next_engine = (rank + 1) % num_engines
        self._num_requests[rank] += num_requests
        self._placed[key] = rank, num_requests

    def rank(self, key: str) -> int:
        return self._placed[key][0]

    def remove(self, key: str) -> None:
        rank, num_requests = self._placed.pop(key, (0, 0))
        self._num_requests[rank] -= num_requests


logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S: Final = 0.02
_RPC: Final = "collective_rpc"


class TracingAsyncLLM(AsyncLLM):
    """An ``AsyncLLM`` that runs traces; connect ``traces`` to its outputs with ``outputs``."""

    handover: SharedMemoryResults | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cache_media_once_sent(self)
        self.traces = TraceRouter()
        self._placement = TracePlacement(self.num_engines)
        self._background: set[asyncio.Future[None]] = set()
        lora = self.vllm_config.lora_config
        self._adapters = AdapterHolds(0 if lora is None else lora.max_cpu_loras)
        self._loading_adapter = asyncio.Lock()

    @property
    def num_engines(self) -> int:
        num_engines: int = self.vllm_config.parallel_config.data_parallel_size
        return num_engines

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on the workers of all engines; raise EngineDeadError if one dies.

        vLLM's own returns the results of the first engine only, and never returns if an engine dies
        meanwhile.
        """
        calls = self.engine_core.call_utility_all_async(_RPC, method, timeout, args, kwargs)
        return [reply for answers in await self._unless_dead(calls) for reply in answers]

    async def _call_engine_of(self, key: str, method: str, *args: Any) -> Any:
        """Call a method on the workers of the engine on which a trace is; return their common result."""
        core = self.engine_core
        engine = core.core_engines[self._placement.rank(key)]
        call = core._call_utility_async(_RPC, method, None, args, None, engine=engine)  # noqa: SLF001 - no public one
        return common_result(await self._unless_dead(call))

    async def _unless_dead(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the engine; raise EngineDeadError if the engine ends, as it then never answers."""
        task = asyncio.ensure_future(call)
        waited_for: set[asyncio.Future[Any]] = {task}
        if self.output_handler is not None:
            waited_for.add(self.output_handler)
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDeadError
            return task.result()
        finally:
            task.cancel()

    def start_request(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start a request of a trace, on the engine on which the trace is placed."""
        assert params.extra_args is not None  # noqa: S101 - it has the entry
        options["data_parallel_rank"] = self._placement.rank(params.extra_args[TRACE_KEY]["key"])
        return TracingAsyncLLM.generate(self, prompt, params, request_id, **options)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does, with the adapter in the workers' memory until the request has ended.

        Raises:
            ApiError: ``invalid_value``: the adapter cannot be loaded. Raised when the outputs are read.
        """
        outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        adapter = kwargs.get("lora_request")
        return outputs if adapter is None else self._holding(adapter, outputs)

    def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool as vLLM does, with the adapter held, see ``generate``."""
        outputs = super().encode(prompt, pooling_params, request_id, **kwargs)
        adapter = kwargs.get("lora_request")
        return outputs if adapter is None else self._holding(adapter, outputs)

    async def _holding(
        self, adapter: LoRARequest, outputs: AsyncGenerator[T, None]
    ) -> AsyncGenerator[T, None]:
        """Pass outputs on, with the adapter in the workers' memory from the first to the last."""
        await self.hold_adapter(adapter)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # which has sent the engine that the request is aborted
            self.release_adapter(adapter)

    async def hold_adapter(self, adapter: LoRARequest) -> None:
        """Keep a LoRA adapter in the memory of all workers of all engines, until ``release_adapter``.

        Raises:
            ApiError: ``invalid_value``: it cannot be loaded, and no worker has it.
        """
        while not self._adapters.hold(adapter.lora_int_id):
            # Shielded: the workers load it, even if this caller is cancelled.
            await asyncio.shield(asyncio.ensure_future(self._load_adapter(adapter)))

    def release_adapter(self, adapter: LoRARequest) -> None:
        self._adapters.release(adapter.lora_int_id)

    async def _load_adapter(self, adapter: LoRARequest) -> None:
        """Load an adapter into all workers, in place of unused ones if there is no room; raise ApiError."""
        number = adapter.lora_int_id
        async with self._loading_adapter:
            if number in self._adapters:
                return
            for unused in self._adapters.pop_unused():
                await self.collective_rpc("remove_lora", args=(unused,))
            # vLLM's own call leaves the errors of all workers but one to be read as results of later calls.
            loaded = (adapter.lora_name, number, adapter.lora_path)
            try:
                check_loaded(adapter, await self.collective_rpc("load_adapter", args=loaded))
            except ApiError:
                await self.collective_rpc("remove_lora", args=(number,))
                raise
            self._adapters.add(number)

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, *args: Any, **kwargs: Any
    ) -> Any:
        """Add a request as vLLM does, and tell its trace that the engine has it."""
        queue = await super().add_request(request_id, prompt, params, *args, **kwargs)
        extra = params.extra_args if isinstance(params, SamplingParams) else None
        if extra and TRACE_KEY in extra:
            self.traces.note_arrival(extra[TRACE_KEY]["key"])
        return queue

    async def begin_trace(self, key: str, num_requests: int, held: bytes | None) -> None:
        """Place a trace on an engine; ``held`` blocks go to its workers ahead of their requests."""
        self._placement.place(key, num_requests, self._in_flight())
        if held is not None:
            await self._call_engine_of(key, "hold_trace", key, held)

    def _in_flight(self) -> list[int]:
        """Return the number of requests that each engine has."""
        if self.num_engines == 1:  # vLLM counts them in order to choose
            return [0]
        core = self.engine_core
        return [core.engine_inflight[engine] for engine in core.core_engines]

    async def collect_trace(self, key: str, results: Mapping[str, Any], index: int) -> bytes:
        data: bytes = await self._call_engine_of(key, "collect_trace", key, results, index)
        return data

    async def finish_trace(self, key: str, results: dict[str, Any]) -> FinishedTrace:
        """Wait for a trace's blocks, and return its results; large ones come as a file in memory."""
        path = None if self.handover is None else self.handover.path(key)
        result: Any = PENDING
        while result == PENDING:  # its blocks are still running; the engine serves others meanwhile
            result = await self._call_engine_of(key, "finish_trace", key, results, path)
            await asyncio.sleep(_POLL_S if result == PENDING else 0)
        self._placement.remove(key)
        data, spent_s, printed, failure, tier, has_begun = result
        if data is None and self.handover is not None:
            data = self.handover.take_file(key)
        note_spent(spent_s)
        return FinishedTrace(data, printed, failure, tier, has_begun, results)

    async def forget_trace(self, key: str, request_ids: Sequence[str]) -> None:
        """Abort a trace's requests and drop its state in the engine; never raises."""
        try:
            # When a caller is cancelled, vLLM aborts its request only if the caller was waiting for outputs.
            await self.abort(request_ids)
            note_spent(await self._call_engine_of(key, "drop_trace", key))
            if self.handover is not None:  # the file of a result that was not collected
                self.handover.forget(key)
        except EngineDeadError:
            return
        except Exception:
            logger.exception("closing a trace in the engine failed")
        finally:
            self._placement.remove(key)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine whose end no caller waits for, except for the request's meter."""
        task = asyncio.ensure_future(work)
        context = current_work()
        if context is not None:
            context.meter.expect(task)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
