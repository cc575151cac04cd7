"""vLLM's own application, for one request with interventions: the results are added to its answer.

Generated answers have one choice. A complete one, and the object in the last event of a stream, has the field
``interventions``; a piece of text has the results since the one before. Of answers about several texts, each
item of ``data`` has the field.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from http import HTTPStatus
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD
from app.engine.call_results import CallResults
from app.engine.request_fields import with_model
from app.formats.json_text import json_bytes
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM, carrying
from nnsight_engine.vllm_backend.call import InterventionCall

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "
_BEFORE: Final = frozenset({"response.created", "response.in_progress"})
"""Events of a stream before its first token. They wait for it, so that a refusal has a status."""
_LAST_RESPONSE: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_LAST_MESSAGE: Final = "message_delta"
_NAMING: Final = _BEFORE | _LAST_RESPONSE | {"message_start"}
"""Events that name the model."""
_PIECES: Final = (".delta", "content_block_delta")
"""Endings of the types of events that carry text."""
_ERRORS: Final = frozenset({"error", "response.failed"})
_CHOICE: Final = 0


@dataclasses.dataclass(frozen=True, slots=True)
class InterveningApp:
    app: ASGIApp
    engine: InterventionAsyncLLM
    results: CallResults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise ApiError if the call failed; also where the application answers with an error of its own."""
        call, answer = self.results.call, _Answer(send, self.results)
        try:
            with carrying(call):
                await self.app(scope, receive, answer.send)
        except Exception as error:
            if call.failure is not None:
                raise call.failure from error
            raise
        finally:
            answer.close()
            self.engine.close_call(call)


class _Answer:
    def __init__(self, send: Send, results: CallResults) -> None:
        self._send = send
        self._results = results
        self._head: Message | None = None
        self._is_stream = False
        self._content = bytearray()
        self._head_timer: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._check_failure(is_error=message["status"] >= HTTPStatus.BAD_REQUEST)
            self._head = message
            self._is_stream = self._header(b"content-type").startswith(b"text/event-stream")
            patience_s = self._results.settings.sse_keep_alive_s
            if self._is_stream and patience_s:
                self._head_timer = asyncio.create_task(self._send_head_late(patience_s), name="first-token")
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._content += message.get("body", b"")
        is_whole = not message.get("more_body", False)
        if self._is_stream:
            await self._send_events(is_whole=is_whole)
        elif is_whole:
            await self._send_body()

    async def _send_body(self) -> None:
        content, head = bytes(self._content), self._pending_head()
        if head["status"] == HTTPStatus.OK:
            content = await json_bytes(await self._with_results(content))
        headers = [header for header in head["headers"] if header[0] != b"content-length"]
        size = str(len(content)).encode()
        await self._send({**head, "headers": [*headers, (b"content-length", size)]})
        await self._send({"type": "http.response.body", "body": content})

    async def _with_results(self, content: bytes) -> Any:
        if not self._header(b"content-type").startswith(b"application/json"):
            raise _without_place()
        answer = with_model(json.loads(content), self._results.context.sent_model)
        items = answer.get("data")
        if not isinstance(items, list):
            return answer | {FIELD: await self._results.remaining_results(_CHOICE)}
        call = self._results.call
        if isinstance(call, InterventionCall) and len(call.entries) != len(items):
            raise _without_place()
        for index, item in enumerate(items):
            item[FIELD] = await self._results.remaining_results(index)
        return answer

    async def _send_events(self, *, is_whole: bool) -> None:
        last_event_end = self._content.rfind(_EVENT_END)
        if last_event_end < 0 and not is_whole:
            return
        stop = len(self._content) if is_whole else last_event_end + len(_EVENT_END)
        frames = [frame for frame in bytes(self._content[:stop]).split(_EVENT_END) if frame]
        if self._head is not None and not is_whole and all(_type_of(frame) in _BEFORE for frame in frames):
            return
        del self._content[:stop]
        content = b"".join([await self._event_with_results(frame) + _EVENT_END for frame in frames])
        await self._send_head()
        await self._send({"type": "http.response.body", "body": content, "more_body": not is_whole})

    async def _send_head(self) -> None:
        head, self._head = self._head, None
        if self._head_timer is not None:
            self._head_timer.cancel()
        if head is not None:
            await self._send(head)

    async def _send_head_late(self, patience_s: float) -> None:
        """Send the head of a stream that waits for its first token, so that comments can keep it alive."""
        await asyncio.sleep(patience_s)
        self._head_timer = None
        await self._send_head()

    def close(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()

    async def _event_with_results(self, frame: bytes) -> bytes:
        kind = _type_of(frame)
        self._check_failure(is_error=kind in _ERRORS)
        is_last = kind in _LAST_RESPONSE or kind == _LAST_MESSAGE
        sent_model = self._results.context.sent_model if kind in _NAMING else None
        results = None
        if is_last or kind.endswith(_PIECES):
            results = await (self._results.remaining_results if is_last else self._results.new_results)(
                _CHOICE
            )
        if results is None and sent_model is None:
            return frame
        head, _, data = frame.partition(_DATA)
        event = with_model(json.loads(data), sent_model)
        if results is not None:
            (event["response"] if kind in _LAST_RESPONSE else event)[FIELD] = results
        return head + _DATA + await json_bytes(event)

    def _header(self, name: bytes) -> bytes:
        return next(
            (value for header_name, value in self._pending_head()["headers"] if header_name == name), b""
        )

    def _pending_head(self) -> Message:
        if self._head is None:
            raise RuntimeError("a body was sent before its head")
        return self._head

    def _check_failure(self, *, is_error: bool) -> None:
        failure: ApiError | None = self._results.call.failure
        if is_error and failure is not None:
            raise failure


def _type_of(frame: bytes) -> str:
    return frame.partition(b"\n")[0].removeprefix(b"event: ").decode()


def _without_place() -> ApiError:
    return ApiError(
        ErrorCode.UNSUPPORTED_COMBINATION,
        "The answer has no place for results: leave out `encoding_format` bytes, and send texts that need "
        "not be embedded in parts.",
        FIELD,
    )
