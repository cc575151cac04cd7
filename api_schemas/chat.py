"""OpenAI's chat completion request and response with our field, for documentation and for clients.

Everything but ``interventions`` and ``preset`` is passed to vLLM's own request model, and not validated here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api_schemas.interventions import Intervention
from api_schemas.presets import PRESET_FIELD, PresetNames
from api_schemas.results import ChoiceInterventions


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(
        default=None, description="A name that GET /v1/models lists; `MODEL:PRESET` names a preset too."
    )
    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(default=None, description="Most tokens to generate.")
    max_tokens: int | None = Field(default=None, description="The older name of max_completion_tokens.")
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=1, description="Answers.")
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    interventions: list[Intervention] | None = Field(
        default=None,
        description="Operations on the model's values, applied in this order. Positions count in the "
        "tokens of the rendered chat template.",
    )
    preset: PresetNames | None = Field(default=None, description=PRESET_FIELD)


class ChatChoice(BaseModel):
    """One answer: ``message`` when whole, ``delta`` in a stream."""

    model_config = ConfigDict(extra="allow")

    index: int
    message: ChatMessage | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    interventions: ChoiceInterventions | None = None


class ChatCompletionResponse(BaseModel):
    """The answer of ``POST /v1/chat/completions``, and the form of each chunk of its stream."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: dict[str, Any] | None = None
