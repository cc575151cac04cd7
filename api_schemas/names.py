"""Names of stored things, such as presets: ``joy`` is the newest version, ``joy@2`` a specific one."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from api_schemas.fields import Name, Strict

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
        whole = handler.resolve_ref_schema(handler(core_schema))
        described: JsonSchemaValue = {key: whole.pop(key) for key in ("title", "description")}
        return {**described, "anyOf": [{"type": "string", "minLength": 1, "maxLength": 128}, whole]}


__all__ = ["NAME_PATTERN", "NAME_RULE", "REFERENCE_PATTERN", "NameOrText", "Reference", "StoredName"]
