"""Selection of the positions at which an operation acts.

Positions are absolute, because prefill and decode do not identify them reliably: after a preemption generated
tokens are prefilled again. Negative ones count from the prompt's end, independent of the generated tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api_schemas.fields import Integer, Items, Strict, Token


class WhereClause(Strict):
    """Conditions on a position; absent conditions, or null, match every position."""

    phase: Literal["prompt", "generated", "all"] = Field(
        default="all", description="Positions of the prompt, of generated tokens, or both."
    )
    positions: Items[Integer] | None = Field(
        default=None, description="Absolute positions; negatives count from the prompt's end."
    )
    range: tuple[Integer, Integer | None] | None = Field(
        default=None,
        description="[start, stop], half-open; negatives count from the prompt's end; stop may be null.",
    )
    tokens: Items[Token] | None = Field(
        default=None,
        description="The input token at the position is one of these ids, or texts from /v1/tokenize.",
    )
    images: Items[Integer] | None = Field(
        default=None,
        description="The position is one of these images', counted from 0; negatives count from the last.",
    )
    scope: Literal["content", "reasoning", "tool_calls"] | None = Field(
        default=None, description="The token sampled from the position belongs to this part of the answer."
    )


class Where(WhereClause):
    """Positions that meet every condition and are not matched by ``exclude``; by default all."""

    exclude: WhereClause | None = Field(default=None, description="Positions to take out.")
