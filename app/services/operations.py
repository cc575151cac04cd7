"""The interventions of a request: read from its body, and checked against what its sender may do.

Names that are close to our fields are rejected as misspellings: vLLM would ignore them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, get_args

from starlette.requests import Request

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import FIELD, Intervention, RequestLimits, parse_interventions
from api_schemas.interventions import FIELD as INTERVENTIONS
from api_schemas.operations import Trace, Write
from api_schemas.presets import FIELD as PRESET
from app.admission.rates import INTERVENING
from app.auth.principal import Principal, check_code_allowed
from app.catalog.names import StoredNames
from app.engine.client import JsonObject
from app.engine.request_fields import isolate_cache, salt_of
from app.http.bodies import THREAD_BYTES
from app.http.contexts import context_of
from app.services.presets import expand_presets

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
    raw, context = body.pop(FIELD, None), context_of(request.scope)
    if raw:
        # Checked before parsing, whose duration is up to the sender.
        caller.check(Scope.INTERVENTIONS)
        if context.admitted is not None:
            await context.admitted.check(*INTERVENING)
    operations = () if raw is None else await _parsed(raw, count, request, components.settings.request_limits)
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
    """Raise ApiError if parts of an answer are named that is forced to be a call, written without markers."""
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
                f"{FIELD}.{index}.where.scope",
            )


async def _parsed(
    raw: object, count: int, request: Request, limits: RequestLimits
) -> tuple[Intervention, ...]:
    declared = request.headers.get("content-length", "")
    is_small = declared.isdecimal() and int(declared[:20]) < THREAD_BYTES
    if is_small and not context_of(request.scope).presets:
        return parse_interventions(raw, limits, count)
    return await asyncio.to_thread(parse_interventions, raw, limits, count)


_CLOSE: Final = 0.8
"""Minimum similarity (1: equal) of a field's name to ours for it to count as a misspelling."""
_MAX_NAMES: Final = 256
_MAX_EXTRA_CHARACTERS: Final = 4


def check_spelling(body: Mapping[str, Any]) -> None:
    """Raise ApiError ``invalid_shape`` for a misspelling of one of our fields."""
    for field in (INTERVENTIONS, PRESET):
        _check_spelling_of(body, field)


def _check_spelling_of(body: Mapping[str, Any], field: str) -> None:
    short = [
        name
        for name in islice(body, _MAX_NAMES)
        if name != field and abs(len(name) - len(field)) <= _MAX_EXTRA_CHARACTERS
    ]
    close = next(iter(get_close_matches(field, map(str.lower, short), n=1, cutoff=_CLOSE)), None)
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
