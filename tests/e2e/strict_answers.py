"""Whatever a test reads over HTTP has the form that the clients of OpenAI and Anthropic declare.

These clients take an answer as it comes; here it is parsed strictly. What they do not know is allowed beside,
and null where a log-probability has overflowed, or is that of a prompt's first token.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import anthropic.types
import httpx
import pytest
from openai.pagination import SyncPage
from openai.types import Completion, CompletionChoice, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, Field, TypeAdapter

Types = Mapping[str, TypeAdapter[Any]]


class Refusal(BaseModel):
    """The body of an answer with an error's status."""

    error: ErrorObject


class PassedOnError(ErrorObject):
    """An error of vLLM's own handlers, whose code is the status, as from vLLM's server."""

    code: int  # type: ignore[assignment]


class PassedOnRefusal(BaseModel):
    error: ErrorObject | PassedOnError


class MessageError(BaseModel, extra="forbid"):
    """An error of vLLM's own handler of messages, whose types are not Anthropic's."""

    type: str
    message: str


class PassedOnMessageRefusal(BaseModel):
    type: Literal["error"]
    error: MessageError


class StreamedChoice(CompletionChoice):
    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    """Part of a streamed completion: its type is that of a whole one, which is not quite true."""

    choices: list[StreamedChoice]  # type: ignore[assignment]


_MESSAGES: Final = "/v1/messages"
_WHOLE: Final[Types] = {
    "/v1/completions": TypeAdapter(Completion),
    "/v1/chat/completions": TypeAdapter(ChatCompletion),
    "/v1/responses": TypeAdapter(Response),
    "/v1/embeddings": TypeAdapter(CreateEmbeddingResponse),
    "/v1/models": TypeAdapter(SyncPage[Model]),
    _MESSAGES: TypeAdapter(anthropic.types.Message),
}
_STREAMED: Final[Types] = {
    "/v1/completions": TypeAdapter(CompletionChunk | Refusal),
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk | Refusal),
    "/v1/responses": TypeAdapter(Annotated[ResponseStreamEvent, Field(discriminator="type")]),
    _MESSAGES: TypeAdapter(anthropic.types.RawMessageStreamEvent | anthropic.types.ErrorResponse),
}
_REFUSED: Final[Types] = {
    **dict.fromkeys(_WHOLE, TypeAdapter(Refusal)),
    **dict.fromkeys(("/v1/responses", "/v1/embeddings"), TypeAdapter(PassedOnRefusal)),
    _MESSAGES: TypeAdapter(anthropic.types.ErrorResponse | PassedOnMessageRefusal),
}
_DATA: Final = "data:"
_END: Final = "[DONE]"


def check(response: httpx.Response) -> None:
    """Parse an answer that has been read.

    Raises:
        ValidationError: It has another form than the clients declare.
    """
    path = response.request.url.path
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    if path not in _WHOLE or not response.content:
        return
    if not response.is_success:
        _REFUSED[path].validate_json(response.content, strict=True)
    elif not is_stream:
        _WHOLE[path].validate_json(_with_logprobs(response.content), strict=True)
    else:
        for line in response.text.splitlines():
            data = line.removeprefix(_DATA).strip()
            if line.startswith(_DATA) and data != _END:
                _STREAMED[path].validate_json(_with_logprobs(data), strict=True)


def _with_logprobs(content: str | bytes) -> str:
    """Return an answer with a number for each log-probability that is null."""
    answer = json.loads(content)
    for choice in answer.get("choices", ()):
        logprobs = choice.get("logprobs") or {}
        for token in logprobs.get("content") or ():
            for one in (token, *token["top_logprobs"]):
                one["logprob"] = one["logprob"] or 0.0
        if "token_logprobs" in logprobs:
            logprobs["token_logprobs"] = [one or 0.0 for one in logprobs["token_logprobs"]]
            top = logprobs["top_logprobs"] or ()
            logprobs["top_logprobs"] = [
                {name: value or 0.0 for name, value in (one or {}).items()} for one in top
            ]
    return json.dumps(answer)


@contextlib.contextmanager
def checked_answers() -> Iterator[None]:
    """Check every answer that is read whole within the block, by whichever client of this process."""
    read, aread = httpx.Response.read, httpx.Response.aread

    def checked_read(response: httpx.Response) -> bytes:
        content = read(response)
        check(response)
        return content

    async def checked_aread(response: httpx.Response) -> bytes:
        content = await aread(response)
        check(response)
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx.Response, "read", checked_read)
        patch.setattr(httpx.Response, "aread", checked_aread)
        yield
