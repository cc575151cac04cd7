"""A server with jobs, and client operations on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from api_schemas.jobs import Job
from tests.integration.scripted_traces import HEADERS, trace
from tests.waiting import wait_for_async


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
