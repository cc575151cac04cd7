"""``POST /v1/tokenize``: the tokens of a text or a conversation for the served model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, RootModel, Tag

from api_schemas.chat import ChatMessage
from api_schemas.fields import Integer, Items, Strict


def _form(value: Any) -> str:
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
        Discriminator(_form),
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


def _kind(value: Any) -> str:
    has_messages = "messages" in value if isinstance(value, dict) else isinstance(value, TokenizeMessages)
    return TokenizeMessages.__name__ if has_messages else TokenizePrompt.__name__


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizePrompt, Tag(TokenizePrompt.__name__)]
            | Annotated[TokenizeMessages, Tag(TokenizeMessages.__name__)],
            Discriminator(_kind),
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


__all__ = ["Token", "TokenizeMessages", "TokenizePrompt", "TokenizeRequest", "TokenizeResponse"]
