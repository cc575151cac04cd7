"""The schemas of presets: named lists of operations that the server keeps, and how requests name them.

A request names presets in its body (``FIELD``), in a header (``HEADER``) and behind its model's name,
``MODEL:PRESET``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from api_schemas.fields import DEFAULT_LIMITS, Listed, Page, Reference, RequestLimits, StoredName, Strict
from api_schemas.interventions import Intervention, parse_interventions

FIELD: Final = "preset"
HEADER: Final = "x-nnsight-preset"
MAX_PRESETS: Final = 8
"""Presets of one request."""
MAX_PRESET_BYTES: Final = 2**20
"""Bytes of one preset as JSON. Larger tensors are vectors, which presets name."""
SEPARATOR: Final = ":"
"""Between a model's name and a preset's."""


def _parse_operations(
    value: object, _: ValidatorFunctionWrapHandler, info: ValidationInfo
) -> list[Intervention]:
    """Parse operations as those of a request are, with the same errors."""
    limits = info.context if isinstance(info.context, RequestLimits) else DEFAULT_LIMITS
    operations = parse_interventions(value, limits)
    if not operations:
        raise ValueError("a preset has at least one operation")
    return list(operations)


class NewPreset(Strict):
    """A preset to be kept.

    Attributes:
        name: Its name in requests; an existing name gets a new version.
        description: Its purpose, for people.
        interventions: Its operations, as in a request.
        shared: Whether every tenant may use it; for keys with the scope ``admin``.
    """

    name: StoredName
    description: str = Field(default="", strict=True, max_length=1000)
    interventions: Annotated[list[Intervention], WrapValidator(_parse_operations), Field(min_length=1)]
    shared: bool = Field(default=False, strict=True)


class Preset(Listed):
    """A kept preset, without its operations.

    Attributes:
        id: Its id.
        object: Always ``preset``.
        name: Its name in requests.
        version: Its version; ``name@version`` always refers to these operations.
        description: Its purpose.
        model: The server's name of the model that it is for.
        operations: The kinds of its operations, each once.
        shared: Whether every tenant may use it.
        own: Whether it belongs to the caller's tenant.
        sha256: SHA-256 of its operations as JSON, hexadecimal.
        bytes: The size that it is counted with.
        created_at: The time of its creation, in seconds since 1970.
    """

    object: Literal["preset"] = "preset"
    name: str
    version: int
    description: str
    model: str
    operations: list[str]
    shared: bool
    own: bool
    sha256: str
    bytes: int
    created_at: float

    @property
    def reference(self) -> Reference:
        return Reference(self.name, self.version)


class PresetContent(Preset):
    """A kept preset.

    Attributes:
        interventions: Its operations. Names of vectors are those of the versions that they meant when the
            preset was made, with their ids.
    """

    interventions: list[dict[str, Any]]


class PresetList(Page[Preset]):
    """A page of presets, the newest first, in the format of OpenAI's lists."""


PresetNames = str | list[str]
"""The value of the field ``preset``."""
PRESET_FIELD: Final = "Presets, `calm` or `calm@3`, whose operations come before `interventions`."
"""The description of the field."""


def split_model(model: str, served: Collection[str]) -> tuple[str, str | None]:
    """Return the served name in ``NAME:PRESET``, and the preset; any other name is returned with None."""
    if model in served:
        return model, None
    name = max(
        (served_name for served_name in served if model.startswith(f"{served_name}{SEPARATOR}")),
        key=len,
        default=None,
    )
    return (model, None) if name is None else (name, model.removeprefix(f"{name}{SEPARATOR}"))
