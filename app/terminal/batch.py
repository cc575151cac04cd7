"""Sends the requests of a batch file to a server, and writes the answers to another file.

The files are those of OpenAI's batches. Answers are written in the order of the requests, to a file beside
the target, which replaces it at the end.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.terminal.server import JsonObject, Server
from nnsight_engine.remote_backend.errors import RemoteError

CONCURRENCY: Final = 64
"""Requests that are under way at once."""
_BAD_REQUEST: Final = 400
_BROKEN_OFF: Final = 502


class BatchRequest(BaseModel):
    """A line of a batch file."""

    model_config = ConfigDict(extra="ignore")

    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


def read_batch(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file; ValueError with the number of a line that is none."""
    with path.open(encoding="utf-8-sig") as lines:  # a file may begin with a byte order mark
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = BatchRequest.model_validate_json(line)
            except ValidationError as error:
                problem = error.errors()[0]
                location = ".".join(map(str, problem["loc"])) or "the line"
                raise ValueError(f"{path}, line {number}: {location}: {problem['msg']}") from error
            if request.method.upper() != "POST" or not request.url.startswith("/"):
                raise ValueError(
                    f"{path}, line {number}: a request is a POST to a path such as /v1/chat/completions"
                )
            if request.body.get("stream"):
                raise ValueError(f"{path}, line {number}: answers of a batch are not streamed; drop `stream`")
            yield request


class Batch:
    """One run of a batch; ValueError for a line that is no request, or a target that cannot be written."""

    def __init__(self, source: Path, target: Path, concurrency: int = CONCURRENCY) -> None:
        self._source = source
        self._target = target.resolve()
        # A pipe or a device is written to as it is.
        self._is_replaced = self._target.is_file() or not self._target.exists()
        self._part_file = (
            self._target.with_name(f"{self._target.name}.part") if self._is_replaced else self._target
        )
        if not self._target.parent.is_dir():
            raise ValueError(f"the answers cannot be written to {target}: make its folder first")
        if any(path.exists() and path.samefile(source) for path in (self._target, self._part_file)):
            raise ValueError(f"the answers would be written over the requests of {source}: choose another -o")
        self._concurrency = concurrency
        self.num_requests = sum(1 for _ in read_batch(source))
        self.num_answered = self.num_failed = 0

    async def run(self, server: Server, console: Console) -> None:
        """Write each answer once those before it have arrived; after an error, they are in ``.part``."""
        try:
            await self._write_all(server, console)
            if self.num_answered != self.num_requests:
                raise ValueError(
                    f"{self._source} had {self.num_requests} requests at first, and {self.num_answered} were "
                    f"answered: it has changed meanwhile; the answers are in {self._part_file}"
                )
            if self._is_replaced:
                self._part_file.replace(self._target)
        except OSError as error:
            raise ValueError(f"the answers cannot be written to {self._part_file}: {error}") from error

    async def _write_all(self, server: Server, console: Console) -> None:
        """Send requests, some at a time, and write the answers in the order of the requests."""
        pending: deque[asyncio.Task[JsonObject]] = deque()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            self._part_file.open("w", encoding="utf-8") as out,
            Progress(*columns, console=console) as progress,
        ):
            task = progress.add_task("Batch", total=self.num_requests)
            try:
                for request in read_batch(self._source):
                    pending.append(asyncio.create_task(_answer(server, request)))
                    if len(pending) == self._concurrency:
                        await self._write(pending.popleft(), out)
                        progress.advance(task)
                while pending:
                    await self._write(pending.popleft(), out)
                    progress.advance(task)
            finally:
                for answering in pending:
                    answering.cancel()
                await asyncio.gather(*pending, return_exceptions=True)

    async def _write(self, answering: asyncio.Task[JsonObject], out: TextIO) -> None:
        answer = await answering
        self.num_answered += 1
        self.num_failed += answer["error"] is not None
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        out.flush()


async def _answer(server: Server, request: BatchRequest) -> JsonObject:
    """Return the line of a request's answer; what fails without an answer counts as a status of 502."""
    error: JsonObject | None = None
    try:
        response = await server.response(request.url, request.body)
        status, request_id = response.status_code, response.headers.get("x-request-id", "")
        body = response.json() if response.content else {}
        if status >= _BAD_REQUEST:
            error = body.get("error", body)
    except (RemoteError, ValueError) as failure:
        status, request_id, body = getattr(failure, "status", None) or _BROKEN_OFF, "", None
        error = {"message": str(failure), "code": getattr(failure, "code", None)}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": error,
    }
