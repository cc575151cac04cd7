"""The events of a stream of vLLM's with the results of interventions in its choices."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator

from api_schemas.errors import ApiError
from api_schemas.interventions import FIELD
from app.engine.call_results import CallResults
from app.engine.client import JsonObject
from app.errors import DONE_FRAME
from app.json_text import json_bytes
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM


async def with_results(
    frames: AsyncIterator[str],
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
        async for frame in frames:
            if frame == DONE_FRAME:
                async for last in _unsent(ended, chunk, results, model, is_chat=is_chat):
                    yield last
                yield frame
                continue
            chunk = json.loads(frame.removeprefix("data: "))
            yield await _frame(chunk, results)
            choices = chunk.get("choices", ())
            ended |= {one["index"] for one in choices if one.get("finish_reason") is not None}
    except ApiError as error:
        if call.failure is not None:
            raise call.failure from error
        raise
    finally:
        try:
            await frames.aclose()  # type: ignore[attr-defined]  # vLLM's streams are generators
        finally:
            engine.close_call(call)  # another one may serve by now


async def _unsent(
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
        yield await _frame({**head, "choices": [{"index": index, **body, "finish_reason": "stop"}]}, results)


async def _frame(chunk: JsonObject, results: CallResults) -> str:
    for choice in chunk.get("choices", ()):
        has_ended = choice.get("finish_reason") is not None
        found = await (results.rest if has_ended else results.part)(choice["index"])
        if found is not None:
            choice[FIELD] = found
            note_stop(choice)
    return f"data: {(await json_bytes(chunk)).decode()}\n\n"


def note_stop(choice: JsonObject) -> None:
    found = choice[FIELD]["results"].items()
    stops = (name for name, result in found if result["type"] == "stop" and result["positions"])
    name = next(stops, None)
    if name is not None and choice.get("finish_reason") is not None:
        choice["stop_reason"] = {"intervention": name}
