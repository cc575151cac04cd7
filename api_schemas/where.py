"""Which positions an operation acts on, as a request says it.

Positions are absolute, because prefill and decode are no stable ideas: after a preemption
generated tokens are prefilled again. Negatives count from the prompt's end, whatever is generated.
All conditions of a clause hold together; ``exclude`` takes out what it names.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api_schemas.fields import Integer, Items, Strict, Token


class WhereClause(Strict):
    """Conditions on a position; an absent one, or null, is no condition."""

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
        description="The input token at the position is one of these ids, or texts as /v1/tokenize has them.",
    )


class Where(WhereClause):
    """Positions that meet every condition and that ``exclude`` does not name; by default all."""

    exclude: WhereClause | None = Field(default=None, description="Positions to take out.")
