"""Resolves a request's ``where`` to a rule with absolute positions and token ids.

A clause that cannot match any position is rejected: it would silently do nothing, and an unsteered
completion would be taken for a steered one.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import excerpt
from api_schemas.where import Where, WhereClause
from nnsight_engine.plans.compile.scope import CompileScope
from nnsight_engine.plans.request_plan import WhereRule
from nnsight_engine.plans.where import Positions, evaluate, may_generate

_EVERYWHERE = WhereRule()


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A rule and the exact number of prompt positions that it matches, with the last of them or -1."""

    rule: WhereRule
    num_prompt: int
    last_prompt: int


def compile_where(where: Where, scope: CompileScope, param: str) -> Named:
    """Resolve the clause.

    Raises ``empty_where``, ``contradictory_where``, ``position_out_of_range``, ``unknown_token``,
    ``unsupported_combination`` or ``invalid_value``.
    """
    rule = _clause(where, scope, param)
    if where.exclude is not None:
        exclude = _clause(where.exclude, scope, f"{param}.exclude")
        rule = msgspec.structs.replace(rule, exclude=exclude)
    if rule == _EVERYWHERE:
        return Named(rule, scope.prompt_len, scope.prompt_len - 1)
    named = _named_prompt(rule, scope)
    if not len(named) and not may_generate(rule, scope.prompt_len, scope.num_positions):
        raise ApiError(ErrorCode.CONTRADICTORY_WHERE, _contradiction(rule, scope), param)
    return Named(rule, len(named), int(named[-1]) if len(named) else -1)


def compile_encoder_rows(where: Where, scope: CompileScope, param: str) -> Named:
    """Resolve the clause of an operation in the vision encoder, which may name nothing but images.

    Its rule has the numbers of the rows (patches) as positions, and no row of an answer.
    """
    others = (where.positions, where.range, where.tokens, where.scope, where.exclude)
    if any(one is not None for one in others):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "In the vision encoder rows are patches of an image, which have no position and no token; "
            "name whole images with `images`.",
            param,
        )
    if where.phase == "generated":
        raise ApiError(
            ErrorCode.CONTRADICTORY_WHERE, "No image is generated; leave out `phase`.", f"{param}.phase"
        )
    if where.images is not None:
        _refuse_empty(where.images, f"{param}.images")
    images = where.images if where.images is not None else [*range(len(scope.media.images))]
    rows = scope.encoder_rows(images, f"{param}.images")
    rule = WhereRule(phase="prompt", positions=tuple(sorted(rows)))
    return Named(rule, len(rows), last_prompt=-1)


def resolve_positions(positions: list[int], phase: str, scope: CompileScope, param: str) -> list[int]:
    """Return absolute positions, in the order given; raise ``position_out_of_range``."""
    resolved = []
    for index, position in enumerate(positions):
        absolute = position + scope.prompt_len if position < 0 else position
        if absolute < 0 or absolute >= scope.num_positions:
            raise _out_of_range(position, scope, f"{param}.{index}")
        if phase == "prompt" and absolute >= scope.prompt_len:
            raise ApiError(
                ErrorCode.POSITION_OUT_OF_RANGE,
                f"With `phase` prompt a position must be below the prompt's {scope.prompt_len} tokens, "
                f"got {position}.",
                f"{param}.{index}",
            )
        resolved.append(absolute)
    return resolved


def _clause(clause: WhereClause, scope: CompileScope, param: str) -> WhereRule:
    positions = tokens = None
    if clause.positions is not None:
        _refuse_empty(clause.positions, f"{param}.positions")
        resolved = resolve_positions(clause.positions, clause.phase, scope, f"{param}.positions")
        positions = tuple(sorted(set(resolved)))
    if clause.images is not None:
        _refuse_empty(clause.images, f"{param}.images")
        seen = set(scope.image_positions(clause.images, f"{param}.images"))
        positions = tuple(sorted(seen if positions is None else seen & set(positions)))
    start, stop = (0, None) if clause.range is None else _range(clause.range, scope, f"{param}.range")
    if clause.tokens is not None:
        _refuse_empty(clause.tokens, f"{param}.tokens")
        ids = {scope.token_id(token, f"{param}.tokens.{index}") for index, token in enumerate(clause.tokens)}
        tokens = tuple(sorted(ids))
    part = 0 if clause.scope is None else scope.part(clause.scope, f"{param}.scope")
    return WhereRule(clause.phase, positions, start, stop, tokens, part)


def _refuse_empty(items: list[int] | list[str | int], param: str) -> None:
    if not items:
        raise ApiError(
            ErrorCode.EMPTY_WHERE,
            "An empty list names no position; leave the field out to name every position.",
            param,
        )


def _range(bounds: tuple[int, int | None], scope: CompileScope, param: str) -> tuple[int, int | None]:
    start, stop = bounds
    first = _bound(start, scope, f"{param}.0")
    if first >= scope.num_positions:
        raise _out_of_range(start, scope, f"{param}.0")
    if stop is None:
        return first, None
    end = _bound(stop, scope, f"{param}.1")
    if first >= end:
        raise ApiError(
            ErrorCode.EMPTY_WHERE,
            f"A range [start, stop] ends before its stop and must name a position; [{start}, "
            f"{excerpt(stop)}] is {first} up to and without {excerpt(end)}, the prompt has "
            f"{scope.prompt_len} tokens.",
            param,
        )
    # No position lies beyond the model's length; an open end can be decided once for all steps.
    return first, None if end >= scope.spec.max_model_len else end


def _bound(bound: int, scope: CompileScope, param: str) -> int:
    resolved = bound + scope.prompt_len if bound < 0 else bound
    if resolved < 0:
        raise _out_of_range(bound, scope, param)
    return resolved


def _out_of_range(position: int, scope: CompileScope, param: str) -> ApiError:
    return ApiError(
        ErrorCode.POSITION_OUT_OF_RANGE,
        f"Positions of this request run from 0 (or {-scope.prompt_len}, counted from the prompt's end) to "
        f"{scope.num_positions - 1}, got {excerpt(position)}: {scope.prompt_len} prompt tokens and those "
        "generated by `max_tokens`, but for the last, which is never fed back to the model.",
        param,
    )


def _named_prompt(rule: WhereRule, scope: CompileScope) -> Positions:
    if rule.phase == "generated":
        return np.empty(0, np.int64)
    positions = scope.prompt_positions
    uses_tokens = rule.tokens is not None or (rule.exclude is not None and rule.exclude.tokens is not None)
    token_ids = scope.prompt_ids if uses_tokens else positions
    parts = scope.prompt_parts if rule.names_part else None
    return positions[evaluate(rule, positions, token_ids, scope.prompt_len, parts)]


def _contradiction(rule: WhereRule, scope: CompileScope) -> str:
    num_generated = scope.num_positions - scope.prompt_len
    if rule.phase == "generated" and num_generated == 0:
        return (
            "With `max_tokens` 1, and where texts are embedded, no generated position is ever computed, so "
            "`phase` generated names nothing; raise `max_tokens`, or name the prompt's last position, -1, "
            "which the first token comes from."
        )
    bare = msgspec.structs.replace(rule, tokens=None)
    if rule.tokens is not None and len(_named_prompt(bare, scope)):
        return (
            "None of these tokens stands at the prompt positions that the other conditions name; "
            "check the tokens against the prompt's (spaces count), or widen the conditions."
        )
    return (
        f"All conditions must hold together, and none of the request's {scope.prompt_len} prompt and "
        f"{num_generated} generated positions meets these; drop or widen one of phase, positions, range, "
        "tokens, images, scope, exclude."
    )
