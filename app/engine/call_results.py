"""Adds the results of a call's interventions to the choices of an answer, or to the events of a stream."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from api_schemas.errors import ApiError
from api_schemas.interventions import FIELD
from app.engine.client import JsonObject
from app.engine.responses import Decode, choice_json
from app.engine.vllm_errors import Refusals
from app.formats.json_text import json_bytes
from app.http.contexts import RequestContext
from app.http.errors import DONE_FRAME
from app.settings import Settings
from app.storage.results import ResultStore
from nnsight_engine.plans.collect.results import CollectedMarks
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM
from nnsight_engine.vllm_backend.call import InterventionCall
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
            engine.close_call(call)  # another one may serve by now


async def _events_of_stopped(
    ended: set[int],
    chunk: JsonObject,
    results: CallResults,
    model: str,
    *,
    is_chat: bool,
) -> AsyncIterator[str]:
    """Yield the last events of choices that a `stop` ended in the prompt: vLLM sends none without text."""
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
    choice_results = choice[FIELD]["results"].items()
    stops = (name for name, result in choice_results if result["type"] == "stop" and result["positions"])
    name = next(stops, None)
    if name is not None and choice.get("finish_reason") is not None:
        choice["stop_reason"] = {"intervention": name}
