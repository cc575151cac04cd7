"""vLLM's asynchronous engine, extended with the requests of traces.

``VLLM(mode="async")`` uses this class; the server's engine (``async_engine``) derives from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Final

from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from nnsight_engine.core.work_context import current_work
from nnsight_engine.vllm_backend.metering import note_spent
from nnsight_engine.vllm_backend.rpc_results import PENDING, answer
from nnsight_engine.vllm_backend.shared_memory_results import SharedMemoryResults
from nnsight_engine.vllm_backend.trace_router import TraceRouter
from nnsight_engine.vllm_backend.trace_run import FinishedTrace
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.02


class TracingAsyncLLM(AsyncLLM):
    """An ``AsyncLLM`` that runs traces, see ``TraceHost``.

    Attributes:
        traces: Routes the events of running blocks; the caller must connect it to vLLM's outputs, see
            ``output_payloads``.
        handover: Transfers large trace results from the workers through files in memory; None to use only
            vLLM's RPC.
    """

    handover: SharedMemoryResults | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine as vLLM does."""
        super().__init__(*args, **kwargs)
        self.traces = TraceRouter()
        self._background: set[asyncio.Future[None]] = set()

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

    def start_request(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start a request of a trace, whose parameters have its entry, and return its outputs."""
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(prompt, params, request_id, **options)
        return outputs

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, *args: Any, **kwargs: Any
    ) -> Any:
        """Send a request to the engine as vLLM does, and notify its trace."""
        queue = await super().add_request(request_id, prompt, params, *args, **kwargs)
        extra = params.extra_args if isinstance(params, SamplingParams) else None
        if extra and TRACE_KEY in extra:
            self.traces.note_arrival(extra[TRACE_KEY]["key"])
        return queue

    async def hold_trace(self, key: str, data: bytes) -> None:
        """Send the blocks of a trace to the workers, ahead of its requests."""
        await self.collective_rpc("hold_trace", args=(key, data))

    async def collect_trace(self, key: str, results: Mapping[str, Any], index: int) -> bytes:
        """Return the encoded results of a block whose request has ended, while the trace continues."""
        data: bytes = answer(await self.collective_rpc("collect_trace", args=(key, results, index)))
        return data

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
            await asyncio.sleep(_POLL_S if result == PENDING else 0)
        data, printed, failure, spent_s, tier, has_begun = result
        if data is None and self.handover is not None:
            data = self.handover.take(key)
        note_spent(spent_s)
        return FinishedTrace(data, printed, failure, tier, has_begun, results)

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

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine whose end no caller waits for, except for the request's meter."""
        task = asyncio.ensure_future(work)
        context = current_work()
        if context is not None:
            context.meter.expect(task)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @property
    def num_background(self) -> int:
        """The number of coroutines that run in the background."""
        return len(self._background)


__all__ = ["TracingAsyncLLM"]
