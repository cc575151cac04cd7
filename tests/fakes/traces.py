"""A trace engine without a model, with predefined outcomes, for tests of the layers above it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from api_schemas.jobs import JobStatus
from app.engine.client import event_frame
from nnsight_engine.core.work_context import current_work
from nnsight_engine.remote_backend.frames import TIER, Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from nnsight_engine.serialization import encode


@dataclasses.dataclass(slots=True)
class FakeTraceBehaviour:
    """The outcome of every trace; may be changed while they run.

    Attributes:
        saves: The final saved values of each block, by name.
        logs: Printed lines, one ``LOG`` event each.
        error: Raised before the first frame.
        late_error: Raised instead of the result.
        hangs: Whether traces wait, instead of returning a result, until they are cancelled.
        delay_s: Sleep before each frame.
        tier: The execution tier that is reported for each trace.
        num_tokens: The tokens that each trace reports as used.
        intervention_s: The engine time that each trace reports as used.
    """

    saves: dict[str, Any] = dataclasses.field(default_factory=dict)
    logs: list[str] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    late_error: Exception | None = None
    hangs: bool = False
    delay_s: float = 0.0
    tier: str = "tap"
    num_tokens: int = 0
    intervention_s: float = 0.0


class FakeTraceEngine:
    """A ``TraceEngine`` that runs nothing.

    Args:
        name: The name under which clients select it.
        behaviour: The outcome; every trace succeeds by default.

    Attributes:
        num_running: The number of traces that run now.
        heads: The heads of all traces received.
        sandboxes: The tenant in whose sandbox each trace was to run.
    """

    def __init__(self, name: str = "vllm", behaviour: FakeTraceBehaviour | None = None) -> None:
        self.name = name
        self.behaviour = behaviour or FakeTraceBehaviour()
        self.num_running = 0
        self.heads: list[TraceHead] = []
        self.sandboxes: list[str | None] = []

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        behaviour = self.behaviour
        self.heads.append(request.head)
        self.sandboxes.append(request.sandbox_of)
        self.num_running += 1
        work = current_work()
        if work is not None:
            work.meter.noted_tokens += behaviour.num_tokens
            work.meter.intervention_s += behaviour.intervention_s
        try:
            await asyncio.sleep(behaviour.delay_s)
            if behaviour.error is not None:
                raise behaviour.error
            for frame in self._told():
                yield frame
                await asyncio.sleep(behaviour.delay_s)
            if behaviour.hangs:
                await asyncio.Event().wait()
            if behaviour.late_error is not None:
                raise behaviour.late_error
            if work is not None:
                work.note_tier(behaviour.tier)
            yield json_frame(FrameKind.OUTPUTS, {TIER: behaviour.tier})
            yield Frame(FrameKind.RESULT, self._result(request.head))
        finally:
            self.num_running -= 1

    def _told(self) -> Iterator[Frame]:
        yield event_frame(JobStatus.RUNNING, engine=self.name)
        for line in self.behaviour.logs:
            yield event_frame(JobStatus.LOG, message=line)

    def _result(self, head: TraceHead) -> bytes:
        one = {"choice": 0, "saves": self.behaviour.saves, "error": None, "shapes": {}}
        num_blocks = max(1, len(head.invokes))
        return encode({"blocks": [{"index": index, **one} for index in range(num_blocks)], "before": None})
