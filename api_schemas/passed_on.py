"""OpenAI's responses and embeddings and Anthropic's messages with our field, for documentation and clients.

Everything but ``interventions`` and ``preset`` is passed to vLLM's own request models, and not validated
here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from api_schemas.interventions import Intervention
from api_schemas.presets import PRESET_FIELD, PresetNames
from api_schemas.results import ChoiceInterventions

_OPERATIONS = "Operations on the model's values, applied in this order. Positions count in the tokens of the "
_RESULTS = (
    "What the operations read. In a stream, an event with text has the part that belongs to its tokens."
)


class ResponsesRequest(BaseModel):
    """The body of ``POST /v1/responses``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(default=None, description="A name that GET /v1/models lists.")
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    interventions: list[Intervention] | None = Field(
        default=None, description=f"{_OPERATIONS}rendered conversation, earlier responses included."
    )
    preset: PresetNames | None = Field(default=None, description=PRESET_FIELD)


class ResponsesResponse(BaseModel):
    """The answer of ``POST /v1/responses``, and ``response`` in the last event of its stream."""

    model_config = ConfigDict(extra="allow")

    interventions: ChoiceInterventions | None = Field(default=None, description=_RESULTS)


class MessagesRequest(BaseModel):
    """The body of ``POST /v1/messages``."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(description="A name that GET /v1/models lists.")
    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    interventions: list[Intervention] | None = Field(
        default=None, description=f"{_OPERATIONS}rendered chat template."
    )
    preset: PresetNames | None = Field(default=None, description=PRESET_FIELD)


class MessagesResponse(BaseModel):
    """The answer of ``POST /v1/messages``; in its stream, the event ``message_delta`` has the field."""

    model_config = ConfigDict(extra="allow")

    interventions: ChoiceInterventions | None = Field(default=None, description=_RESULTS)


class EmbeddingsRequest(BaseModel):
    """The body of ``POST /v1/embeddings``, ``/pooling`` and ``/classify``; with ``messages``, one prompt."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(default=None, description="A name that GET /v1/models lists.")
    input: str | list[str] | list[int] | list[list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: str | None = Field(default=None, description="With interventions `float` or `base64`.")
    dimensions: int | None = None
    interventions: list[Intervention] | None = Field(
        default=None,
        description=f"{_OPERATIONS}text; `prompts` names the texts that an operation is for.",
    )
    preset: PresetNames | None = Field(default=None, description=PRESET_FIELD)


class EmbeddedText(BaseModel):
    """One item of ``data``."""

    model_config = ConfigDict(extra="allow")

    index: int
    interventions: ChoiceInterventions | None = Field(default=None, description="What the operations read.")


class EmbeddingsResponse(BaseModel):
    """The answer of the same routes."""

    model_config = ConfigDict(extra="allow")

    data: list[EmbeddedText] = Field(default_factory=list)


__all__ = [
    "EmbeddedText",
    "EmbeddingsRequest",
    "EmbeddingsResponse",
    "MessagesRequest",
    "MessagesResponse",
    "ResponsesRequest",
    "ResponsesResponse",
]
