"""Presets in requests: how they are named, and what a request with them means.

``expand_presets`` is the only place where names become operations: all that is checked, counted and cached
afterwards is that of a request with the operations written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, ErrorCode, clip, excerpt
from api_schemas.fields import Reference
from api_schemas.interventions import FIELD as INTERVENTIONS
from api_schemas.presets import FIELD, HEADER, MAX_PRESETS, SEPARATOR, PresetContent, split_model
from app.auth.principal import Principal
from app.catalog.presets import Presets
from app.engine.client import JsonObject
from app.engine.served_model import ServedModel
from app.http.contexts import context_of

if TYPE_CHECKING:
    from app.components import Components

_CODE: Final = "trace"
_MAX_LISTED: Final = 1000
"""Versions that the list of models looks at."""
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
    value = body.pop(FIELD, None)
    if isinstance(value, str):
        named.append(NamedPreset(value, FIELD))
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        named += [NamedPreset(text, f"{FIELD}.{index}") for index, text in enumerate(value)]
    elif value is not None:
        raise ApiError(
            ErrorCode.INVALID_SHAPE,
            f'`{FIELD}` must be a preset\'s name, such as "calm" or "calm@3", or a list of names; got '
            f"{excerpt(value)}.",
            FIELD,
        )
    if len(named) > MAX_PRESETS:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A request may name {MAX_PRESETS} presets, got {len(named)}; make one preset of several.",
            FIELD,
        )
    return named


def check_names(presets: Sequence[PresetContent], own_operations: Sequence[object]) -> None:
    """Raise ApiError ``duplicate_name`` if two presets, or one and the request, share a name."""
    parts = [(f"the preset {preset.reference}", preset.interventions) for preset in presets]
    source_by_name: dict[str, tuple[str, bool]] = {}
    for source, operations in [*parts, (f"`{INTERVENTIONS}`", own_operations)]:
        for operation in operations:
            name = operation.get("name") if isinstance(operation, dict) else None
            if not isinstance(operation, dict) or not isinstance(name, str):
                continue
            is_for_all = operation.get("prompts") is None
            other_source, other_is_for_all = source_by_name.setdefault(name, (source, is_for_all))
            if other_source != source and (is_for_all or other_is_for_all):
                raise ApiError(
                    ErrorCode.DUPLICATE_NAME,
                    f"Names of operations must differ within a request; {clip(name)!r} is one of "
                    f"{other_source} and of {source}.",
                    INTERVENTIONS,
                )


async def expand_presets(body: JsonObject, request: Request, components: Components) -> None:
    """Put the operations of the presets that a request names in front of its own; changes the body.

    Afterwards ``interventions`` has all operations, ``model`` is a name of the model alone, and
    ``preset`` is gone. Raises ApiError, ``model_not_found`` for a preset behind a model's name.
    """
    context = context_of(request.scope)
    caller, own_operations = context.caller, body.get(INTERVENTIONS)
    model = components.engine.served()
    sent_model = body.get("model")
    named = named_presets(body, request.headers.getlist(HEADER), (*model.names, *model.adapters))
    if own_operations:
        caller.check_free(f"`{INTERVENTIONS}` of its own", INTERVENTIONS)
    if not named:
        return
    caller.check(Scope.INTERVENTIONS)
    presets = await _find_presets(named, caller, components)
    if own_operations is None or isinstance(own_operations, list):  # anything else is refused by the parser
        check_names(presets, own_operations or [])
        body[INTERVENTIONS] = [op for preset in presets for op in preset.interventions] + (
            own_operations or []
        )
    context.note_presets([str(preset.reference) for preset in presets])
    for preset in presets:
        context.record.note_named("preset", preset.name, shared=preset.shared)
    if body.get("model") != sent_model:
        context.sent_model = str(sent_model)


def drop_presets(body: JsonObject, served: ServedModel) -> None:
    """Leave the model's own name of ``MODEL:PRESET``, for routes whose requests do not run the model."""
    model = body.get("model")
    if isinstance(model, str):
        body["model"], _ = split_model(model, (*served.names, *served.adapters))


async def _find_presets(
    named: Sequence[NamedPreset], caller: Principal, components: Components
) -> list[PresetContent]:
    references = {name.reference for name in named if name.reference is not None}
    preset_by_reference = await components.presets.find(references, caller.tenant)
    presets: dict[str, PresetContent] = {}
    for name in named:
        preset = None if name.reference is None else preset_by_reference.get(name.reference)
        if preset is None:
            raise name.not_found("GET /v1/presets lists those that there are")
        reference = preset.reference
        if preset.model not in components.presets.models:
            raise name.not_found(f"{reference} is for the model {clip(preset.model)!r}")
        has_code = any(op["op"] == _CODE for op in preset.interventions)
        if not caller.may_use(reference, has_code=has_code):
            why = ", whose code needs a key that names this version" if has_code else ""
            caller.check_free(f"the preset {reference}{why}", name.param)
        presets[preset.id] = preset
    return list(presets.values())


async def add_presets(listed: JsonObject, presets: Presets, caller: Principal) -> JsonObject:
    """Return the list of models with those that name a preset of the caller's, ``MODEL:PRESET``."""
    if Scope.INTERVENTIONS not in caller.scopes:
        return listed
    models = presets.models
    if caller.presets is None:
        names = await presets.names(caller.tenant, _MAX_LISTED)
    else:
        references = [
            reference for reference in map(Reference.parse, sorted(caller.presets)) if reference is not None
        ]
        presets_of_key = await presets.find(references, caller.tenant)
        names = [str(reference) for reference, preset in presets_of_key.items() if preset.model in models]
    base = next((card for card in listed["data"] if card["id"] == models[0]), {"object": "model"})
    cards = [{**base, "id": f"{models[0]}{SEPARATOR}{name}", "parent": models[0]} for name in sorted(names)]
    return {**listed, "data": [*listed["data"], *cards]}
