"""Traces and jobs as clients send them, an engine that does what they say, and the answers' frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import httpx

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.jobs import Job, JobStatus
from app.engine.client import event_frame
from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader, json_frame
from nnsight_engine.remote_backend.messages import MEDIA_TYPE, SentInvoke, TraceHead, TraceRequest
from tests.fakes.results import MODEL
from tests.waiting import wait_for_async

HEADERS = {"content-type": MEDIA_TYPE}
RESULT = b"what was saved"


def trace(script: str = "ok", *, payload: bytes = b"blocks", **head: Any) -> bytes:
    """Return a request that has the engine do what ``script`` says."""
    fields = {"model": "fake-model", "dialect": "vllm", "client": script, **head}
    return TraceRequest(TraceHead(**fields), [payload]).to_bytes()


class ScriptedEngine:
    """A ``TraceEngine``; ``hang`` waits for ``released``, ``hang-early`` before it says that it runs.

    Attributes:
        started: Job ids in the order in which they began.
        most_running: How many ran at once.
    """

    name = "vllm"

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.is_busy = False
        self.started: list[str] = []
        self.payloads: list[bytes] = []
        self.num_running = 0
        self.most_running = 0
        self.num_ended = 0

    async def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        if self.is_busy:
            raise ApiError(ErrorCode.QUEUE_FULL, "The engine's own queue is full.")
        self.started.append(job_id)
        self.payloads.append(bytes(request.parts[0][:100]))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            script, _, number = request.head.client.partition(":")
            if script == "hang-early":
                await self.released.wait()
            if script == "gone" and len(self.started) == 1:
                raise ApiError(ErrorCode.ENGINE_RESTARTING, "Another engine is loading the model.")
            yield event_frame(JobStatus.RUNNING, engine=self.name)
            async for frame in self._played(script, int(number or 0)):
                yield frame
        finally:
            # An engine that cleans up may await there.
            await asyncio.sleep(0)
            self.num_running -= 1
            self.num_ended += 1

    async def _played(self, script: str, number: int) -> AsyncGenerator[Frame, None]:
        if script == "hang":
            await self.released.wait()
        for count in range(number if script in {"logs", "prints"} else 0):
            yield event_frame(JobStatus.LOG, message=f"line {count}" + "x" * 10_000 * (script == "prints"))
        if script == "odd":
            yield event_frame(JobStatus.LOG, message="a\0b" + "x" * 100_000)
        if script == "refused":
            raise ApiError(ErrorCode.WRONG_WIDTH, "`vector` is \ud800 too wide.", "vector")
        if script == "crash":
            raise RuntimeError("secret path /etc/x")
        if script == "dead":
            raise ApiError(ErrorCode.ENGINE_DEAD, "The engine has stopped.")
        if script == "error-frame":
            yield json_frame(FrameKind.OUTPUTS, {"half": 1})
            yield json_frame(
                FrameKind.ERROR, {"error": {"message": "no room", "code": "engine_capture_full"}}
            )
            return
        if script == "block-fails":
            yield event_frame(JobStatus.ERROR, message="ZeroDivisionError: division by zero")
        yield Frame(FrameKind.OUTPUT, b"for who follows it live")
        yield json_frame(FrameKind.OUTPUTS, {"0/0": {"text": "out"}})
        if script != "no-result":
            yield Frame(FrameKind.RESULT, bytes(number) if script == "big" else RESULT)


def frames_of(data: bytes) -> list[Frame]:
    """Return the frames of an answer, which must be whole."""
    reader = FrameReader(2**40)
    frames = [Frame(frame.kind, bytes(frame.data)) for frame in reader.feed(data)]
    assert reader.is_between
    return frames


def message(model: str = MODEL, blocks: bytes = b"blocks", **head: Any) -> bytes:
    """Return a trace of one request, which only a real engine would read."""
    fields: dict[str, Any] = {"dialect": "vllm", "invokes": [SentInvoke(prompt="a")], "groups": [{}], **head}
    return TraceRequest(TraceHead(model=model, **fields), [blocks]).to_bytes()


def answered(response: httpx.Response) -> list[Frame]:
    """Return the frames of a whole answer."""
    assert response.status_code == 200, response.text
    reader = FrameReader(2**30)
    frames = list(reader.feed(response.content))
    assert reader.is_between
    return frames


def told(frames: list[Frame]) -> Iterator[str]:
    """Yield what a trace's frames are, events by their status."""
    for frame in frames:
        yield frame.json()["status"] if frame.kind is FrameKind.EVENT else frame.kind.name


class Jobs:
    """A server of any kind with its scripted engine, and what a client of it does with its jobs."""

    def __init__(self, server: Any, engine: Any) -> None:
        self.server = server
        self.engine = engine
        self.client: httpx.AsyncClient = server.client

    async def post(self, script: str = "ok", key: str | None = None, **options: Any) -> httpx.Response:
        headers = HEADERS if key is None else {**HEADERS, "Idempotency-Key": key}
        params = {"rerun": True} if options.pop("rerun", False) else {}
        return await self.client.post(
            "/v1/jobs", content=trace(script, **options), headers=headers, params=params
        )

    async def submit(self, script: str = "ok", **options: Any) -> str:
        response = await self.post(script, **options)
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    async def get(self, job_id: str) -> Job:
        response = await self.client.get(f"/v1/jobs/{job_id}")
        assert response.status_code == 200, response.text
        return Job.model_validate(response.json())

    async def until(self, job_id: str, *statuses: str) -> Job:
        await wait_for_async(lambda: self.is_one_of(job_id, statuses))
        return await self.get(job_id)

    async def is_one_of(self, job_id: str, statuses: Sequence[str]) -> bool:
        return (await self.get(job_id)).status in statuses

    async def has_events(self, job_id: str, num: int) -> bool:
        return (await self.get(job_id)).num_events >= num

    async def end(self, job_id: str) -> Job:
        return await self.until(job_id, "COMPLETED", "ERROR", "CANCELLED")

    async def result(self, job_id: str, **headers: str) -> httpx.Response:
        return await self.client.get(f"/v1/jobs/{job_id}/result", headers=headers)

    async def events(self, job_id: str, after: int = 0) -> list[dict[str, Any]]:
        response = await self.client.get(f"/v1/jobs/{job_id}/events", params={"after": after})
        assert response.headers["content-type"].startswith("text/event-stream")
        return sent_events(response.text)


def sent_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append(json.loads(fields["data"]))
            assert fields["id"] == str(events[-1]["id"])
    return events
