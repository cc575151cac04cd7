"""Adds the results of a call's interventions to the choices of an answer, or to the events of a stream.

``InterveningApp`` does so for vLLM's own application. Its generated answers have one choice: a complete one,
and the object in the last event of a stream, has the field ``interventions``; a piece of text has the results
since the one before. Of answers about several texts, each item of ``data`` has the field.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from http import HTTPStatus
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD
from app.engine.client import JsonObject
from app.engine.request_fields import with_model
from app.engine.responses import Decode, choice_json
from app.engine.vllm_errors import Refusals
from app.formats.json_text import json_bytes
from app.http.contexts import RequestContext
from app.http.errors import DONE_FRAME
from app.settings import Settings
from app.storage.results import ResultStore
from nnsight_engine.plans.collect.results import CollectedMarks
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM, carrying
from nnsight_engine.vllm_backend.operations_call import InterventionCall
from nnsight_engine.vllm_backend.trace_call import TraceCall

Call = InterventionCall | TraceCall


@dataclasses.dataclass(frozen=True, slots=True)
class CallResults:
    """The results that a call has read so far, as JSON of the choices of its answer."""

    call: Call
    num_choices: int
    context: RequestContext
    store: ResultStore
    settings: Settings
    decode: Decode
    base_path: str = ""
    inline: bool = False

    async def new_results(self, choice: int) -> JsonObject | None:
        """Return the results that belong to the tokens delivered so far; None if none are new."""
        if isinstance(self.call, TraceCall):
            return await self._json(choice, await self.call.take_part(choice, self.num_choices))
        return await self._json(choice, self.call.take_part(choice, self.num_choices))

    async def remaining_results(self, choice: int) -> JsonObject | None:
        """Return the remaining results of a choice that has ended."""
        return await self._json(choice, self.call.take_final(choice, self.num_choices))

    def stopped(self) -> set[int]:
        call = self.call
        return call.stopped(self.num_choices) if isinstance(call, InterventionCall) else set()

    async def _json(self, choice: int, collected: Any) -> JsonObject | None:
        """Return results as JSON, None for none; note which kinds have marked the choice, for the metrics."""
        if collected is None:
            return None
        call = self.call
        self.context.marked |= {
            (result.kind, choice)
            for result in collected.results
            if isinstance(result, CollectedMarks) and result.positions
        }
        # Code reports its own results.
        operations = call.operations(choice, self.num_choices) if isinstance(call, InterventionCall) else ()
        answer = await choice_json(
            collected,
            store=self.store,
            work=self.context,
            settings=self.settings,
            decode=self.decode,
            base_path=self.base_path,
            operations=operations,
            inline=self.inline,
        )
        images = call.images(choice, self.num_choices) if collected.final else ()
        return {**answer, "images": images} if images else answer


async def with_results(
    frames: AsyncGenerator[str, None],
    refusals: Refusals,
    engine: InterventionAsyncLLM,
    results: CallResults,
    model: str,
    *,
    is_chat: bool,
) -> AsyncIterator[str]:
    """Yield the stream with each choice's results of operations.

    Before the last frame comes an event for each choice that a `stop` ended in the prompt: vLLM sends none.
    """
    call = results.call
    ended: set[int] = set()
    chunk: JsonObject = {}
    try:
        with refusals:
            async for frame in frames:
                if frame == DONE_FRAME:
                    async for event in _events_of_stopped(ended, chunk, results, model, is_chat=is_chat):
                        yield event
                    yield frame
                    continue
                chunk = json.loads(frame.removeprefix("data: "))
                yield await _frame_with_results(chunk, results)
                choices = chunk.get("choices", ())
                ended |= {choice["index"] for choice in choices if choice.get("finish_reason") is not None}
    except ApiError as error:
        if call.failure is not None:
            raise call.failure from error
        raise
    finally:
        try:
            await frames.aclose()
        finally:
            engine.close_call(call)  # `engine` made this call; a restarted one may serve now


async def _events_of_stopped(
    ended: set[int],
    chunk: JsonObject,
    results: CallResults,
    model: str,
    *,
    is_chat: bool,
) -> AsyncIterator[str]:
    """Yield the last events of choices that a `stop` ended in the prompt: vLLM sends none without text.

    ``chunk`` is the last one that vLLM sent, whose id and time they get; empty if it sent none.
    """
    for index in sorted(results.stopped() - ended):
        body = {"delta": {"role": "assistant", "content": ""}} if is_chat else {"text": "", "logprobs": None}
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        head |= {key: chunk[key] for key in head if key in chunk}
        yield await _frame_with_results(
            {**head, "choices": [{"index": index, **body, "finish_reason": "stop"}]}, results
        )


async def _frame_with_results(chunk: JsonObject, results: CallResults) -> str:
    """Return a chunk as an event, with the results that each of its choices has by now."""
    for choice in chunk.get("choices", ()):
        has_ended = choice.get("finish_reason") is not None
        choice_results = await (results.remaining_results if has_ended else results.new_results)(
            choice["index"]
        )
        if choice_results is not None:
            choice[FIELD] = choice_results
            note_stop(choice)
    return f"data: {(await json_bytes(chunk)).decode()}\n\n"


def note_stop(choice: JsonObject) -> None:
    """Name the `stop` that has ended a choice as its ``stop_reason``, if one has."""
    choice_results = choice[FIELD]["results"].items()
    stops = (name for name, result in choice_results if result["type"] == "stop" and result["positions"])
    name = next(stops, None)
    if name is not None and choice.get("finish_reason") is not None:
        choice["stop_reason"] = {"intervention": name}


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
        """Pass on the application's messages: a stream's head at its first token, a body once complete."""
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
        """Send the complete answer, with results unless it is an error."""
        content, head = bytes(self._content), self._pending_head()
        if head["status"] == HTTPStatus.OK:
            content = await json_bytes(await self._with_results(content))
        headers = [header for header in head["headers"] if header[0] != b"content-length"]
        size = str(len(content)).encode()
        await self._send({**head, "headers": [*headers, (b"content-length", size)]})
        await self._send({"type": "http.response.body", "body": content})

    async def _with_results(self, content: bytes) -> Any:
        """Return a complete answer with its results; with a list ``data``, each item has its own."""
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
        """Send the events that are complete; those before the first token wait for it, with the head."""
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
        """Send the head of a stream, once, and stop the timer that would send it late."""
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
        """Return an event with the results since the last one, if it carries text or ends the stream."""
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
