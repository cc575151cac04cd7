"""An engine for runs of traces, without vLLM's: a ``TraceHost``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams

from nnsight_engine.remote_backend.unread_output import Backpressure
from nnsight_engine.vllm_backend.running_trace import FinishedTrace, MergedRun, TraceRequests, TraceRouter
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY, TraceEntry


class Engine:
    """An engine whose requests' outputs a test decides.

    Attributes:
        script: The steps of a request, by its prompt; a prompt may also hold them itself.
    """

    def __init__(self, max_bytes: int = 2**30, result: bytes = b"") -> None:
        self.result = result
        self.unread = Backpressure(max_bytes)
        self.traces = TraceRouter(self.unread)
        self.num_running = 0
        self.output_processor = None
        self.script: dict[str, Sequence[Any]] = {}
        self.held: dict[str, bytes] = {}
        self.forgotten: list[str] = []
        self.aborted: list[str] = []

    async def start_request(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[Any, None]:
        """Make an output for each number, an event for bytes, and raise an exception."""
        assert params.extra_args is not None
        key, index = (params.extra_args[TRACE_KEY][name] for name in ("key", "index"))
        steps = prompt["steps"] if "steps" in prompt else self.script[prompt["prompt"]]
        self.num_running += 1
        last = steps[-1] if isinstance(steps, Sequence) else None
        try:
            self.traces.note_arrival(key)
            for step in steps:
                await asyncio.sleep(0)
                if isinstance(step, bytes):
                    self.traces.deliver([(key, index, step, "")], 0)
                elif isinstance(step, Exception):
                    raise step
                else:
                    choice = SimpleNamespace(
                        index=0, token_ids=list(range(step)), text="a" * step, finish_reason=None
                    )
                    yield SimpleNamespace(
                        request_id=request_id, outputs=[choice], finished=step == last,
                        prompt=None, prompt_token_ids=[1],
                    )  # fmt: skip
        finally:
            self.num_running -= 1

    async def begin_trace(self, key: str, num_requests: int, held: bytes | None) -> None:
        if held is not None:
            self.held[key] = held

    async def collect_trace(self, key: str, results: Mapping[str, Any], index: int) -> bytes:
        raise NotImplementedError

    async def finish_trace(self, key: str, results: dict[str, Any]) -> FinishedTrace:
        return FinishedTrace(self.result, "", "", "tap", has_begun=True, results=results)

    async def forget_trace(self, key: str, request_ids: Sequence[str]) -> None:
        self.forgotten.append(key)
        self.aborted += request_ids

    def run(self, *requests: Sequence[Any], key: str = "key", max_pending_bytes: int = 2**30) -> MergedRun:
        """Return the run of a trace with a request for each list of steps."""
        sent = TraceRequests(key)
        for index, steps in enumerate(requests):
            prompt = {"steps": steps}
            sent.add(prompt, SamplingParams(), TraceEntry(key, index, 1, b"", [], sandbox_of=None))
        return MergedRun(self, sent, max_pending_bytes=max_pending_bytes)
