"""OpenAI's completion request and response with our field, for documentation and for clients.

Everything but ``interventions`` and ``preset`` is passed to vLLM's own request model, and not validated here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api_schemas.interventions import Intervention
from api_schemas.presets import PRESET_FIELD, PresetNames
from api_schemas.results import ChoiceInterventions


class CompletionRequest(BaseModel):
    """The body of ``POST /v1/completions``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(
        default=None, description="A name that GET /v1/models lists; `MODEL:PRESET` names a preset too."
    )
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=16, description="Most tokens to generate.")
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=1, description="Answers per prompt.")
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    logprobs: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    echo: bool | None = False
    interventions: list[Intervention] | None = Field(
        default=None, description="Operations on the model's values, applied in this order."
    )
    preset: PresetNames | None = Field(default=None, description=PRESET_FIELD)


class CompletionChoice(BaseModel):
    """One answer."""

    model_config = ConfigDict(extra="allow")

    index: int
    text: str
    finish_reason: str | None = None
    interventions: ChoiceInterventions | None = None


class CompletionResponse(BaseModel):
    """The answer of ``POST /v1/completions``, and the form of each chunk of its stream."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: dict[str, Any] | None = None
