"""Completions, chat completions and tokens of prompts; and captured tensors that are too large for JSON.

A completion without ``interventions`` skips all work that concerns them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.generation import TokenizeRequest, TokenizeResponse
from api_schemas.interventions import Intervention
from app.admission.estimates import check_choices, num_choices, num_prompts, of_body
from app.auth.principal import Principal
from app.components import Components
from app.engine.client import EngineReply, JsonObject
from app.engine.request_fields import event_with_model, with_model
from app.formats.json_text import json_bytes
from app.http.bodies import BodyLimits, read_object
from app.http.contexts import context_of, start_while_connected
from app.http.errors import validated
from app.http.openapi import (
    BINARY,
    CHAT_BODY,
    COMPLETION_BODY,
    GENERATION_ANSWERS,
    error_responses,
    json_body,
)
from app.observability.metrics import TokenTimes
from app.routes.parameters import Completer, Intervener, ServerComponents
from app.services.operations import check_spelling, isolate, take_operations, with_values
from app.services.streaming import ClosingStream, StartedAnswer, event_stream, with_first_event

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    tags=["openai"],
    summary="Answer a conversation, with interventions",
    openapi_extra=CHAT_BODY,
    responses=GENERATION_ANSWERS,
)
async def create_chat_completion(
    request: Request, components: ServerComponents, caller: Completer
) -> Response:
    """OpenAI's chat completions, as vLLM serves them, plus the field ``interventions``."""
    return await _generate(components, request, caller, components.engine.chat)


@router.post(
    "/v1/completions",
    tags=["openai"],
    summary="Complete a prompt, with interventions",
    openapi_extra=COMPLETION_BODY,
    responses=GENERATION_ANSWERS,
)
async def create_completion(request: Request, components: ServerComponents, caller: Completer) -> Response:
    """OpenAI's completions, as vLLM serves them, plus the field ``interventions``."""
    return await _generate(components, request, caller, components.engine.completions)


@router.post(
    "/v1/tokenize",
    tags=["interventions"],
    summary="Tokenize a text; interventions count positions in these tokens",
    openapi_extra=json_body(TokenizeRequest),
    responses={
        200: {"model": TokenizeResponse, "description": "The tokens."},
        **error_responses(400, 404, 413, 422, 503),
    },
    response_model=None,
)
async def tokenize(request: Request, components: ServerComponents, caller: Completer) -> Response:
    """A prompt's tokens as `/v1/completions` has them, or a conversation's, rendered up to the answer."""
    del caller  # permission to complete includes permission to tokenize
    settings = components.settings
    limits = BodyLimits(settings.max_body_bytes, settings.upload_idle_timeout_s)
    tokenize_request = validated(TokenizeRequest, await read_object(request, limits))
    reply = await components.engine.tokenize(tokenize_request, request)
    return Response(await json_bytes(reply.body), media_type="application/json")


@router.get(
    "/v1/results/{result_id}",
    tags=["interventions"],
    summary="Fetch captured tensors as a safetensors file",
    response_class=Response,
    responses={
        200: {
            "description": "A safetensors file.",
            "content": {"application/safetensors": {"schema": BINARY}},
        },
        **error_responses(404, 429, 503),
    },
)
async def get_result(result_id: str, components: ServerComponents, caller: Intervener) -> Response:
    """The file that a choice's ``interventions.results`` refers to, until it expires."""
    result = await components.store.open(result_id, caller.tenant)
    return ClosingStream(
        result.chunks(),
        media_type="application/safetensors",
        headers={"Content-Length": str(result.num_bytes), "Cache-Control": "private, no-store"},
        on_close=result.close,
        stall_s=components.settings.client_stall_timeout_s,
    )


_PROMPT: Final = "prompt"
_TRUNCATE: Final = "truncate_prompt_tokens"
_FORMS: Final = ({int}, {str}, {list})
"""Types of a prompt's items; those of lists are checked separately."""

Generate = Callable[[JsonObject, tuple[Intervention, ...], Request], Awaitable[EngineReply]]
"""``EngineClient.completions`` or ``EngineClient.chat``."""


async def _generate(components: Components, request: Request, caller: Principal, call: Generate) -> Response:
    """Return the response; raises ApiError, or ClientDisconnect after the engine's work was cancelled."""
    settings, context = components.settings, context_of(request.scope)
    limits = BodyLimits(settings.max_body_bytes, settings.upload_idle_timeout_s)
    body = await read_object(request, limits)
    check_spelling(body)
    check_choices(body, settings.bounds.max_choices)
    _check_prompts(body, components.engine.capabilities().sizes.max_model_len)
    # A conversation is one prompt, even if it also has fields of completions.
    count = 1 if "messages" in body else num_prompts(body)
    interventions = await take_operations(body, count, request, components, caller)
    if context.admitted is not None:
        await context.admitted.reserve(of_body(body))
    interventions = await with_values(interventions, request, components, caller)
    isolate(interventions, body, request, caller)
    times = TokenTimes(components.metrics, context.record, num_choices(body)) if body.get("stream") else None
    # A stream that has to wait may begin with a comment; what vLLM does not take as a stream may not.
    patience_s = settings.sse_keep_alive_s if body.get("stream") is True else 0
    beginning = await start_while_connected(
        request.receive,
        _started_answer(call(body, interventions, request)),
        context.deadline,
        patience_s or None,
    )
    if beginning.done() and (answer_body := beginning.result().body) is not None:
        content = await json_bytes(with_model(answer_body, context.sent_model))
        return Response(content, media_type="application/json")

    def passed(event: str) -> str:
        """Return an event as it is sent to the client; its token counts for the metrics."""
        if times is not None:
            times.record_event(event)
        return event if context.sent_model is None else event_with_model(event, context.sent_model)

    return event_stream(beginning, context, settings, passed)


async def _started_answer(answer: Awaitable[EngineReply]) -> StartedAnswer:
    """Return the engine's whole answer, or its stream with the first event read."""
    reply = await answer
    return StartedAnswer(body=reply.body) if reply.stream is None else await with_first_event(reply.stream)


def _check_prompts(body: JsonObject, max_model_len: int) -> None:
    """Raise ApiError ``invalid_value``; vLLM checks prompts id by id, and reports each wrong one."""
    prompt = body.get(_PROMPT)
    if not isinstance(prompt, list) or not prompt:
        return
    kinds = set(map(type, prompt))
    kinds_of_ids = set(map(type, chain.from_iterable(prompt))) if kinds == {list} else {int}
    if kinds not in _FORMS or not kinds_of_ids <= {int}:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists.",
            _PROMPT,
        )
    longest = 0  # texts are checked by vLLM, which tokenizes them
    if kinds == {int}:
        longest = len(prompt)
    elif kinds == {list}:
        longest = max(map(len, prompt))
    if longest > max_model_len and body.get(_TRUNCATE) is None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A prompt may have {max_model_len} tokens with its answer, got {longest}; send a shorter one, "
            f"or {_TRUNCATE}.",
            _PROMPT,
        )
