"""Field types shared by several schemas: strict numbers, bounded strings, lists that stop at the first error.

JSON's ``true`` is not accepted as the number 1, nor ``"1"`` as a number. A million invalid items are one
error.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from api_schemas.errors import ErrorCode
from api_schemas.excerpt import clip

Integer = Annotated[int, Field(strict=True)]
"""An integer; booleans and 1.0 are rejected."""

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number; integers are accepted, booleans are rejected."""

# A length limit makes pydantic check that the string is valid Unicode: lone surrogates cannot be encoded.
ShortText = Annotated[str, Field(strict=True, max_length=256)]
"""A string of at most 256 characters."""

Name = Annotated[str, Field(strict=True, min_length=1, max_length=128)]
"""Key of a result."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation ends at the first invalid item."""


def _is_list(value: Any) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


def text_or_number(value: Any) -> str:
    return "text" if isinstance(value, str) else "number"


PointText = ShortText
At = Annotated[
    Annotated[PointText, Tag("one")] | Annotated[Items[PointText], Tag("several"), Field(min_length=1)],
    Discriminator(_is_list),
]
"""A point's string form, or a list of them."""

Layers = Annotated[
    Annotated[ShortText, Tag("one")] | Annotated[Items[Integer], Tag("several"), Field(min_length=1)],
    Discriminator(_is_list),
]
"""``all``, a selection such as ``3:9``, or a list of layers, negatives counted from the end."""

Token = Annotated[
    Annotated[ShortText, Tag("text")] | Annotated[Integer, Tag("number")],
    Discriminator(text_or_number),
]
"""A token: its id, or a string that is exactly one token, as ``/v1/tokenize`` returns it."""


class Strict(BaseModel):
    """A part of a request: unknown fields are errors, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_known_fields(cls, value: Any) -> Any:
        # Like pydantic's check for ``extra``, whose error does not list the known fields.
        given = value if isinstance(value, dict) else {}
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            name = clip(str(unknown))
            raise PydanticCustomError(
                ErrorCode.INVALID_SHAPE.value,
                "there is no field `{field}` here; the fields are {known}",
                {"field": name, "known": ", ".join(known)},
            )
        return value
