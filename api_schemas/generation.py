"""Requests and responses of OpenAI's and Anthropic's APIs with our field, for documentation and clients.

Everything but ``interventions`` and ``preset`` is passed to vLLM's own request models, and not validated
here.

``POST /v1/tokenize``: the tokens of a text or a conversation for the served model.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag

from api_schemas.fields import Integer, Items, Strict
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


def _form_of_prompt(value: Any) -> str:
    return "ids" if isinstance(value, list) else "text"


class TokenizePrompt(Strict):
    """A text or token ids, in the form of a prompt of ``/v1/completions``.

    Attributes:
        model: A name that ``GET /v1/models`` lists.
        prompt: The text, or the ids.
    """

    model: str | None = None
    prompt: Annotated[
        Annotated[str, Field(strict=True), Tag("text")]
        | Annotated[Items[Annotated[Integer, Field(ge=0)]], Tag("ids"), Field(min_length=1)],
        Discriminator(_form_of_prompt),
    ]


class TokenizeMessages(Strict):
    """A conversation, in the form of ``/v1/chat/completions``.

    Attributes:
        model: A name that ``GET /v1/models`` lists.
        messages: The conversation; rendered up to the beginning of the answer.
        tools: Functions that the answer may call, for the chat template.
        documents: Documents that the answer may quote, for templates that support them.
        chat_template_kwargs: Further variables of the template.
        add_generation_prompt: Whether the beginning of the answer is rendered; true by default.
        continue_final_message: Whether the last message is left open, so that the answer continues it.
    """

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def _form_of_request(value: Any) -> str:
    has_messages = "messages" in value if isinstance(value, dict) else isinstance(value, TokenizeMessages)
    return TokenizeMessages.__name__ if has_messages else TokenizePrompt.__name__


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizePrompt, Tag(TokenizePrompt.__name__)]
            | Annotated[TokenizeMessages, Tag(TokenizeMessages.__name__)],
            Discriminator(_form_of_request),
        ]
    ]
):
    """A text, or a conversation."""


class Token(BaseModel):
    """One token.

    Attributes:
        id: Its number in the vocabulary.
        text: The text that names this token and no other: its own text with its blank, and with bytes that
            form no whole character as ``<0xE2>``.
    """

    id: int
    text: str


class TokenizeResponse(BaseModel):
    """The tokens, in order; the first is at position 0.

    Attributes:
        model: The model whose tokenizer was used.
        tokens: The tokens.
    """

    model: str
    tokens: list[Token]
