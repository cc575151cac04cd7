"""How a request names presets: behind its model's name, in a header, in its body."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip, excerpt
from api_schemas.interventions import FIELD as INTERVENTIONS
from api_schemas.names import Reference
from api_schemas.presets import FIELD, HEADER, MAX_PRESETS, PresetContent, split_model

_MODEL = "model"


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPreset:
    text: str
    param: str
    model: str = ""

    @property
    def reference(self) -> Reference | None:
        """None if the text is no name."""
        return Reference.parse(self.text)

    def not_found(self, why: str) -> ApiError:
        code = ErrorCode.MODEL_NOT_FOUND if self.model else ErrorCode.PRESET_NOT_FOUND
        of_model = (
            f", so the model {clip(f'{self.model}:{self.text}')!r} does not exist" if self.model else ""
        )
        return ApiError(code, f"There is no preset {clip(self.text)!r}{of_model}; {why}.", self.param)


def named_presets(body: dict[str, Any], headers: Sequence[str], served: Collection[str]) -> list[NamedPreset]:
    """Return the presets that a request names, in the order in which they apply; raises ApiError.

    ``preset`` is removed from the body, and ``model`` becomes a name of the model alone.
    """
    named: list[NamedPreset] = []
    model = body.get(_MODEL)
    if isinstance(model, str):
        body[_MODEL], preset = split_model(model, served)
        if preset is not None:
            named.append(NamedPreset(preset, _MODEL, body[_MODEL]))
    texts = [text.strip() for header in headers for text in header.split(",")]
    named += [NamedPreset(text, HEADER) for text in texts if text]
    given = body.pop(FIELD, None)
    if isinstance(given, str):
        named.append(NamedPreset(given, FIELD))
    elif isinstance(given, list) and all(isinstance(one, str) for one in given):
        named += [NamedPreset(text, f"{FIELD}.{index}") for index, text in enumerate(given)]
    elif given is not None:
        raise ApiError(
            ErrorCode.INVALID_SHAPE,
            f'`{FIELD}` must be a preset\'s name, such as "calm" or "calm@3", or a list of names; got '
            f"{excerpt(given)}.",
            FIELD,
        )
    if len(named) > MAX_PRESETS:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A request may name {MAX_PRESETS} presets, got {len(named)}; make one preset of several.",
            FIELD,
        )
    return named


def check_names(presets: Sequence[PresetContent], own: Sequence[object]) -> None:
    """Raise ApiError ``duplicate_name`` if two presets, or one and the request, share a name."""
    parts = [(f"the preset {one.reference}", one.interventions) for one in presets]
    taken: dict[str, tuple[str, bool]] = {}
    for source, operations in [*parts, (f"`{INTERVENTIONS}`", own)]:
        for operation in operations:
            name = operation.get("name") if isinstance(operation, dict) else None
            if not isinstance(operation, dict) or not isinstance(name, str):
                continue
            for_all = operation.get("prompts") is None
            other, other_for_all = taken.setdefault(name, (source, for_all))
            if other != source and (for_all or other_for_all):
                raise ApiError(
                    ErrorCode.DUPLICATE_NAME,
                    f"Names of operations must differ within a request; {clip(name)!r} is one of {other} and "
                    f"of {source}.",
                    INTERVENTIONS,
                )


__all__ = ["NamedPreset", "check_names", "named_presets"]
