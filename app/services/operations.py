"""The interventions of a request: read from its body, and checked against what its sender may do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, get_args

from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD, Intervention, RequestLimits, parse_interventions
from api_schemas.keys import Scope
from api_schemas.operations import Write
from api_schemas.request_traces import Trace
from app.admission.quotas import INTERVENING
from app.auth.code_policy import check_code_allowed
from app.auth.principal import Principal
from app.body import THREAD_BYTES
from app.engine.cache_salts import isolate_cache, salt_of
from app.engine.client import JsonObject
from app.request_context import context_of
from app.services.stored_names import StoredNames

if TYPE_CHECKING:
    from app.context import Context

_WRITES: Final = (*get_args(Write), Trace)
_LEAVES_CHOICE: Final = (None, "auto", "none")
"""Kinds of ``tool_choice`` that force no call."""


async def take_operations(
    body: JsonObject, count: int, request: Request, context: Context, caller: Principal
) -> tuple[Intervention, ...]:
    """Take a request's operations, and those of its presets, out of the body; raises ApiError.

    ``model`` of the body becomes a name of the model alone; ``count`` is the number of prompts.
    """
    await context.presets.expand(request, body)
    raw, asked = body.pop(FIELD, None), context_of(request.scope)
    if raw:
        # Checked before parsing, whose duration is up to the sender.
        caller.check(Scope.INTERVENTIONS)
        if asked.admitted is not None:
            await asked.admitted.check(*INTERVENING)
    operations = await _parsed(raw, count, request, context.settings.request_limits)
    _check_scopes(operations, body)
    asked.record.note_operations(body, operations)
    if any(isinstance(operation, Trace) for operation in operations):
        check_code_allowed(context.settings, caller)
    return operations


async def with_values(
    operations: tuple[Intervention, ...], request: Request, context: Context, caller: Principal
) -> tuple[Intervention, ...]:
    """Replace names by their values; raises ApiError if there is nothing of a name."""
    names = StoredNames(context.vectors, context.detectors, context.dictionaries, caller.tenant)
    found = await names.resolved(operations)
    for kind, name, shared in names.used.values():
        context_of(request.scope).record.note_named(kind, name, shared=shared)
    return found


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
    if not raw:
        return parse_interventions(raw)
    declared = request.headers.get("content-length", "")
    is_small = declared.isdecimal() and int(declared[:20]) < THREAD_BYTES
    if is_small and not context_of(request.scope).presets:
        return parse_interventions(raw, limits, count)
    return await asyncio.to_thread(parse_interventions, raw, limits, count)


__all__ = ["isolate", "take_operations", "with_values"]
