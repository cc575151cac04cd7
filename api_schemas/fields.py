"""What schemas share: strict numbers, bounded strings, versioned names, pages of lists, limits.

JSON's ``true`` is not accepted as the number 1, nor ``"1"`` as a number. A list stops at its first
invalid item, so a million of them are one error. ``joy`` names the newest version of a stored thing,
``joy@2`` a specific one. ``RequestLimits`` reach the schemas through ``parse_interventions``, as
validation context.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from api_schemas.errors import ErrorCode, clip

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
        fields = value if isinstance(value, dict) else {}
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in fields if name not in known), None)
        if unknown is not None:
            name = clip(str(unknown))
            raise PydanticCustomError(
                ErrorCode.INVALID_SHAPE.value,
                "there is no field `{field}` here; the fields are {known}",
                {"field": name, "known": ", ".join(known)},
            )
        return value


def field_error(code: ErrorCode, message: str, field: str = "") -> PydanticCustomError:
    """Return the error of a validator; ``field`` is below the model that is validated, empty for itself."""
    # Passed through the context, because pydantic treats braces in the message itself as a template.
    return PydanticCustomError(code.value, "{message}", {"message": message, "field": field})


NAME_PATTERN: Final = r"[a-z0-9][a-z0-9._-]{0,63}"
"""The allowed names."""
NAME_RULE: Final = (
    "at most 64 lower-case letters, digits and . _ -, of which the first is a letter or a digit"
)
REFERENCE_PATTERN: Final = rf"^{NAME_PATTERN}(@[1-9][0-9]{{0,8}})?$"
"""The form of a name with or without a version."""

_REFERENCE: Final = re.compile(rf"(?P<name>{NAME_PATTERN})(?:@(?P<version>[1-9][0-9]{{0,8}}))?")

StoredName = Annotated[
    str,
    Field(
        strict=True,
        pattern=rf"^{NAME_PATTERN}$",
        description="At most 64 lower-case letters, digits and . _ -; the first is a letter or a digit.",
    ),
]


class Reference(NamedTuple):
    """A name, and the version; None for the newest."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> Reference | None:
        """Return what a text such as ``joy@2`` refers to; None if it is no reference."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            return None
        return cls(match["name"], None if match["version"] is None else int(match["version"]))


class NameOrText(Strict):
    """A name with or without a version, as an object or as a plain string."""

    name: Name
    id: Name | None = Field(default=None, description="Its id; it must have this name and version.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe both forms: a plain string, and the object that it is read as."""
        object_schema = handler.resolve_ref_schema(handler(core_schema))
        description_of: JsonSchemaValue = {key: object_schema.pop(key) for key in ("title", "description")}
        return {
            **description_of,
            "anyOf": [{"type": "string", "minLength": 1, "maxLength": 128}, object_schema],
        }


class Listed(BaseModel):
    """An item of a list, with the id by which the next page is asked for."""

    id: str


T = TypeVar("T", bound=Listed)


class Page(BaseModel, Generic[T]):
    """A page, the newest first.

    Attributes:
        object: Always ``list``.
        data: The items.
        first_id: The id of the first item.
        last_id: The id of the last item; pass it as ``after`` for the next page.
        has_more: Whether there is a next page.
    """

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None = None
    last_id: str | None = Field(default=None, description="Pass it as `after` for the next page.")
    has_more: bool

    @classmethod
    def of(cls, data: Sequence[T], *, has_more: bool) -> Self:
        items = list(data)
        ends = {"first_id": items[0].id, "last_id": items[-1].id} if items else {}
        return cls(data=items, has_more=has_more, **ends)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request's interventions.

    Attributes:
        max_operations: Operations of one prompt.
        max_request_operations: Operations of all prompts together, where ``max_operations`` is not more.
        max_request_points: Point strings of all operations together.
        max_tensor_bytes: Bytes of one tensor, decoded; numbers in a list count four bytes each.
        max_points_per_op: Point strings in one ``at``, before patterns are expanded.
        max_list_items: Positions, tokens, units, layers or targets in one list.
    """

    max_operations: int = 64
    max_request_operations: int = 2048
    max_request_points: int = 65536
    max_tensor_bytes: int = 64 * 1024 * 1024
    max_points_per_op: int = 1024
    max_list_items: int = 131072


DEFAULT_LIMITS: Final = RequestLimits()
"""The default limits."""
