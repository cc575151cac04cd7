"""The interventions of a request: its presets and operations, checked against what its sender may do.

``expand_presets`` is the only place where names of presets become operations: all that is checked, counted
and cached afterwards is that of a request with the operations written out. Names of fields that are close to
ours are rejected as misspellings: vLLM would ignore them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, get_args

from starlette.requests import Request

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, ErrorCode, clip, excerpt
from api_schemas.fields import Reference
from api_schemas.interventions import FIELD as INTERVENTIONS
from api_schemas.interventions import Intervention, RequestLimits, parse_interventions
from api_schemas.operations import Trace, Write
from api_schemas.presets import FIELD as PRESET
from api_schemas.presets import HEADER, MAX_PRESETS, SEPARATOR, PresetContent, split_model
from app.admission.rates import INTERVENING
from app.auth.principal import Principal, check_code_allowed
from app.catalog.names import StoredNames
from app.catalog.presets import Presets
from app.engine.client import JsonObject
from app.engine.request_fields import isolate_cache, salt_of
from app.engine.served_model import ServedModel
from app.http.bodies import THREAD_BYTES
from app.http.contexts import context_of

if TYPE_CHECKING:
    from app.components import Components

_WRITES: Final = (*get_args(Write), Trace)
_LEAVES_CHOICE: Final = (None, "auto", "none")
"""Kinds of ``tool_choice`` that force no call."""


async def take_operations(
    body: JsonObject, count: int, request: Request, components: Components, caller: Principal
) -> tuple[Intervention, ...]:
    """Take a request's operations, and those of its presets, out of the body; raises ApiError.

    ``model`` of the body becomes a name of the model alone; ``count`` is the number of prompts.
    """
    await expand_presets(body, request, components)
    raw, context = body.pop(INTERVENTIONS, None), context_of(request.scope)
    if raw:
        # Checked before parsing, whose duration is up to the sender.
        caller.check(Scope.INTERVENTIONS)
        if context.admitted is not None:
            await context.admitted.check(*INTERVENING)
    operations = (
        ()
        if raw is None
        else await _parse_operations(raw, count, request, components.settings.request_limits)
    )
    _check_scopes(operations, body)
    context.record.note_operations(body, operations)
    if any(isinstance(operation, Trace) for operation in operations):
        check_code_allowed(components.settings, caller)
    return operations


async def with_values(
    operations: tuple[Intervention, ...], request: Request, components: Components, caller: Principal
) -> tuple[Intervention, ...]:
    """Replace names by their values; raises ApiError if there is nothing of a name."""
    if not operations:
        return operations
    names = StoredNames(components.vectors, components.detectors, components.dictionaries, caller.tenant)
    resolved = await names.resolved(operations)
    for kind, row in names.used.values():
        context_of(request.scope).record.note_named(kind.name, row.name, shared=row.shared)
    return resolved


def isolate(
    operations: tuple[Intervention, ...], body: JsonObject, request: Request, caller: Principal
) -> None:
    """Give a request its part of the prefix cache."""
    has_writes = any(isinstance(operation, _WRITES) for operation in operations)
    context_of(request.scope).record.salt = "writes" if has_writes else salt_of(body, caller)
    isolate_cache(body, caller)


def _check_scopes(operations: tuple[Intervention, ...], body: JsonObject) -> None:
    """Refuse ``where.scope`` if ``tool_choice`` forces a call: such an answer has no parts to tell apart."""
    choice = body.get("tool_choice")
    if (choice.get("type") if isinstance(choice, dict) else choice) in _LEAVES_CHOICE:
        return
    for index, operation in enumerate(operations):
        if isinstance(operation, Trace):
            continue
        where = operation.where
        if where.scope is not None or (where.exclude is not None and where.exclude.scope is not None):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "A call that `tool_choice` forces is written by a grammar, without the tokens that tell the "
                "parts of an answer apart: leave out `scope`, or let the model choose.",
                f"{INTERVENTIONS}.{index}.where.scope",
            )


async def _parse_operations(
    raw: object, count: int, request: Request, limits: RequestLimits
) -> tuple[Intervention, ...]:
    """Parse and check operations, those of large bodies and of presets on a thread."""
    declared = request.headers.get("content-length", "")
    is_small = declared.isdecimal() and int(declared[:20]) < THREAD_BYTES
    if is_small and not context_of(request.scope).presets:
        return parse_interventions(raw, limits, count)
    return await asyncio.to_thread(parse_interventions, raw, limits, count)


_MIN_SIMILARITY: Final = 0.8
"""Minimum similarity (1: equal) of a field's name to ours for it to count as a misspelling."""
_MAX_NAMES: Final = 256
_MAX_EXTRA_CHARACTERS: Final = 4


def check_spelling(body: Mapping[str, Any]) -> None:
    """Raise ApiError ``invalid_shape`` for a misspelling of one of our fields."""
    for field in (INTERVENTIONS, PRESET):
        _check_spelling_of(body, field)


def _check_spelling_of(body: Mapping[str, Any], field: str) -> None:
    """Raise ApiError for a similar name of a field, or for the field within ``extra_body``."""
    short = [
        name
        for name in islice(body, _MAX_NAMES)
        if name != field and abs(len(name) - len(field)) <= _MAX_EXTRA_CHARACTERS
    ]
    close = next(iter(get_close_matches(field, map(str.lower, short), n=1, cutoff=_MIN_SIMILARITY)), None)
    if close is not None:
        name = next(name for name in short if name.lower() == close)
        raise ApiError(
            ErrorCode.INVALID_SHAPE, f"There is no field `{clip(name)}`; did you mean `{field}`?", clip(name)
        )
    nested = body.get("extra_body")
    if isinstance(nested, dict) and field in nested:
        raise ApiError(
            ErrorCode.INVALID_SHAPE,
            f"`extra_body` is an argument of OpenAI's client, which sends what is in it beside the other "
            f"fields; send `{field}` so.",
            "extra_body",
        )


_TRACE: Final = "trace"
_MAX_LISTED: Final = 1000
"""Versions that the list of models looks at."""
_MODEL = "model"


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPreset:
    """A preset as a request names it: by ``param``, in ``MODEL:PRESET`` behind the name ``model``."""

    text: str
    param: str
    model: str = ""

    @property
    def reference(self) -> Reference | None:
        """None if the text is no name."""
        return Reference.parse(self.text)

    def not_found(self, why: str) -> ApiError:
        """Return the error for a name without a preset, or of a model that is then unknown."""
        code = ErrorCode.MODEL_NOT_FOUND if self.model else ErrorCode.PRESET_NOT_FOUND
        of_model = (
            f", so the model {clip(f'{self.model}:{self.text}')!r} does not exist" if self.model else ""
        )
        return ApiError(code, f"There is no preset {clip(self.text)!r}{of_model}; {why}.", self.param)


def named_presets(body: dict[str, Any], headers: Sequence[str], served: Collection[str]) -> list[NamedPreset]:
    """Return the presets that a request names, in the order in which they apply; raises ApiError.

    ``preset`` is removed from the body, and ``model`` becomes a name of the model alone.
    """
    presets: list[NamedPreset] = []
    model = body.get(_MODEL)
    if isinstance(model, str):
        body[_MODEL], preset = split_model(model, served)
        if preset is not None:
            presets.append(NamedPreset(preset, _MODEL, body[_MODEL]))
    texts = [text.strip() for header in headers for text in header.split(",")]
    presets += [NamedPreset(text, HEADER) for text in texts if text]
    value = body.pop(PRESET, None)
    if isinstance(value, str):
        presets.append(NamedPreset(value, PRESET))
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        presets += [NamedPreset(text, f"{PRESET}.{index}") for index, text in enumerate(value)]
    elif value is not None:
        raise ApiError(
            ErrorCode.INVALID_SHAPE,
            f'`{PRESET}` must be a preset\'s name, such as "calm" or "calm@3", or a list of names; got '
            f"{excerpt(value)}.",
            PRESET,
        )
    if len(presets) > MAX_PRESETS:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A request may name {MAX_PRESETS} presets, got {len(presets)}; make one preset of several.",
            PRESET,
        )
    return presets


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
    requested = named_presets(body, request.headers.getlist(HEADER), (*model.names, *model.adapters))
    if own_operations:
        caller.check_free(f"`{INTERVENTIONS}` of its own", INTERVENTIONS)
    if not requested:
        return
    caller.check(Scope.INTERVENTIONS)
    presets = await _find_presets(requested, caller, components)
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
    requested: Sequence[NamedPreset], caller: Principal, components: Components
) -> list[PresetContent]:
    """Return the presets, each once, in order; raises ApiError for one that the caller may not use."""
    references = {name.reference for name in requested if name.reference is not None}
    preset_by_reference = await components.presets.find(references, caller.tenant)
    presets: dict[str, PresetContent] = {}
    for name in requested:
        preset = None if name.reference is None else preset_by_reference.get(name.reference)
        if preset is None:
            raise name.not_found("GET /v1/presets lists those that there are")
        reference = preset.reference
        if preset.model not in components.presets.models:
            raise name.not_found(f"{reference} is for the model {clip(preset.model)!r}")
        has_code = any(op["op"] == _TRACE for op in preset.interventions)
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
