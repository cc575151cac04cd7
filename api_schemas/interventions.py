"""The field ``interventions``: a list of operations, and the function that parses it.

It does not depend on a model; sizes are bounded before anything is allocated for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import Annotated, Any, Final, get_args

from pydantic import Field, ValidationError

from api_schemas.errors import ApiError, ErrorCode, clip, excerpt
from api_schemas.fields import DEFAULT_LIMITS, RequestLimits
from api_schemas.operations import AnyOperation, Trace

Operation = Annotated[AnyOperation, Field(discriminator="op")]
"""One declarative operation, identified by ``op``."""

Intervention = Annotated[AnyOperation | Trace, Field(discriminator="op")]
"""One operation, identified by ``op``."""

_SCHEMAS: Final[dict[str, type[AnyOperation | Trace]]] = {
    schema.model_fields["op"].default: schema for schema in (*get_args(AnyOperation), Trace)
}
OPERATIONS: Final = tuple(_SCHEMAS)
"""Values of ``op``."""

FIELD: Final = "interventions"

__all__ = [
    "FIELD",
    "OPERATIONS",
    "Intervention",
    "Operation",
    "PromptOperations",
    "RequestLimits",
    "parse_interventions",
    "path_in",
]

_OUR_CODES: Final = frozenset(code.value for code in ErrorCode)
_MAX_FIELDS: Final = 32
_LISTS_WITH_LIMITS: Final = ("units", "layers", "targets", "prompts", "features", "changes")
_WHERE_LISTS: Final = ("positions", "tokens")

_CODES: Final = {
    "finite_number": ErrorCode.NOT_FINITE,
    "greater_than_equal": ErrorCode.INVALID_VALUE,
    "less_than_equal": ErrorCode.INVALID_VALUE,
    "too_short": ErrorCode.INVALID_VALUE,
    "too_long": ErrorCode.INVALID_VALUE,
    "string_too_short": ErrorCode.INVALID_VALUE,
    "string_too_long": ErrorCode.INVALID_VALUE,
    "string_unicode": ErrorCode.INVALID_VALUE,
}
"""Our code for pydantic's types of error; types that are not listed are ``invalid_shape``."""

_FORMS: Final = {
    "at": 'Name a point such as "layers.3.output", or a list of them.',
    "changes": 'Give a list of changes such as [{"feature": 123, "mode": "set", "value": 8.0}].',
    "features": 'Give a list of features, by id or label, such as [123, "cats"].',
    "layers": 'Give "all", a selection such as "3:9", or a list of layers such as [5].',
    "positions": "Give a list of positions such as [0, -1].",
    "prompts": "Give a list of the prompts' numbers such as [0].",
    "range": "Give [start, stop], half-open, such as [0, 4]; stop may be null.",
    "targets": 'Give a list of tokens such as [" Paris", 42].',
    "tokens": 'Give a list of tokens such as [" Paris", 42].',
    "units": "Give a list of indices such as [0, 7].",
    "vectors": 'Give a list of vectors such as [{"vector": {"name": "joy"}, "weight": -1}].',
}
"""The expected form of fields with more than one number or word, for error messages."""

_LITERAL_CODES: Final = {"dtype": ErrorCode.WRONG_DTYPE, "encoding": ErrorCode.WRONG_ENCODING}
"""Our code for a value outside a field's list of words, for fields with a code of their own."""


def parse_interventions(
    raw: object, limits: RequestLimits = DEFAULT_LIMITS, num_prompts: int | None = None
) -> tuple[Intervention, ...]:
    """Parse the untrusted value of the field ``interventions``; None counts as an empty list.

    Raises:
        ApiError: ``invalid_shape`` (422), ``unknown_operation``, ``not_finite``, ``wrong_encoding``,
            ``wrong_dtype``, ``tensor_too_large``, ``too_many_operations`` or ``invalid_value``, with
            the field's path in ``param``.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise ApiError(
            ErrorCode.INVALID_SHAPE, f"`{FIELD}` must be a list of operations, got {excerpt(raw)}.", FIELD
        )
    _check_number(raw, limits, num_prompts)
    operations = tuple(_parse_one(item, f"{FIELD}.{index}", limits) for index, item in enumerate(raw))
    _check_alone(operations)
    if num_prompts is not None:
        _check_prompts(operations, num_prompts)
    return operations


class PromptOperations:
    """A request's operations, grouped by prompt once."""

    def __init__(self, operations: Sequence[Intervention]) -> None:
        """Group operations by the prompts that they name; those without names are for all prompts."""
        self._shared: list[tuple[int, Intervention]] = []
        self._by_prompt: defaultdict[int, list[tuple[int, Intervention]]] = defaultdict(list)
        for index, op in enumerate(operations):
            if isinstance(op, Trace) or op.prompts is None:
                self._shared.append((index, op))
                continue
            for prompt in op.prompts:
                self._by_prompt[prompt].append((index, op))

    def of(self, prompt: int) -> list[tuple[int, Intervention]]:
        """Return the operations of one prompt in order, each with its index in the request."""
        of_prompt = self._by_prompt.get(prompt)
        return sorted([*self._shared, *of_prompt], key=itemgetter(0)) if of_prompt else self._shared


def _check_number(raw: list[object], limits: RequestLimits, num_prompts: int | None) -> None:
    """Check the numbers of operations and points, of a prompt and of the request, before parsing any."""
    num_points = sum(len(at) if isinstance(at := _field(item, "at"), list) else 1 for item in raw)
    if num_points > limits.max_request_points:
        raise ApiError(
            ErrorCode.TOO_MANY_OPERATIONS,
            f"All operations together may name {limits.max_request_points} points, got {num_points}. A "
            "pattern, `layers.*.output`, is one.",
            FIELD,
        )
    if len(raw) <= limits.max_operations:
        return
    num_by_prompt: Counter[int] = Counter()
    num_shared = 0
    for index, item in enumerate(raw):
        prompts = _field(item, "prompts")
        if isinstance(prompts, list) and len(raw) <= limits.max_request_operations:
            most_prompts = limits.max_list_items if num_prompts is None else num_prompts
            _check_list(prompts, f"{FIELD}.{index}.prompts", most_prompts)
            num_by_prompt.update(prompt for prompt in prompts if isinstance(prompt, int))
        else:
            num_shared += 1
    num_operations = num_shared + max(num_by_prompt.values(), default=0)
    if num_operations > limits.max_operations:
        raise ApiError(
            ErrorCode.TOO_MANY_OPERATIONS,
            f"A prompt may have {limits.max_operations} operations, and all prompts together "
            f"{max(limits.max_operations, limits.max_request_operations)}, got {num_operations}. "
            "One operation may name many points: give `at` a list or a pattern.",
            FIELD,
        )


def _field(item: object, name: str) -> object:
    return item.get(name) if isinstance(item, dict) else None


def _check_prompts(operations: Sequence[Intervention], num_prompts: int) -> None:
    """Reject numbers of prompts that the request does not have, or that are named twice."""
    for index, operation in enumerate(operations):
        prompts = () if isinstance(operation, Trace) else operation.prompts or ()
        beyond = [prompt for prompt in prompts if prompt >= num_prompts]
        if beyond or len(set(prompts)) < len(prompts):
            got = f"got {beyond[0]}" if beyond else "got one of them twice"
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"`prompts` counts from 0, must be below {num_prompts}, as many as this request has, and "
                f"name each once; {got}.",
                f"{FIELD}.{index}.prompts",
            )


def _check_alone(operations: Sequence[Intervention]) -> None:
    """Reject a trace together with another operation: their order could not be guaranteed."""
    for index, operation in enumerate(operations):
        if isinstance(operation, Trace) and len(operations) > 1:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"A request with a `trace` has no other operation, got {len(operations)} "
                "operations: the trace's code can read and write every point itself.",
                f"{FIELD}.{index}",
            )


def _parse_one(item: object, param: str, limits: RequestLimits) -> Intervention:
    """Parse one operation, whose path in the request is ``param``; ApiError for its first problem."""
    if not isinstance(item, dict):
        raise ApiError(
            ErrorCode.INVALID_SHAPE, f"An operation must be an object, got {excerpt(item)}.", param
        )
    operation = item.get("op")
    if not isinstance(operation, str):
        raise ApiError(
            ErrorCode.INVALID_SHAPE,
            f"An operation needs `op`, one of {', '.join(OPERATIONS)}; got {excerpt(operation)}.",
            f"{param}.op",
        )
    schema = _SCHEMAS.get(operation)
    if schema is None:
        raise ApiError(
            ErrorCode.UNKNOWN_OPERATION,
            f"`op` must be one of {', '.join(OPERATIONS)}; got {excerpt(operation)}.",
            f"{param}.op",
        )
    _check_lengths(item, param, limits)
    try:
        return schema.model_validate(item, context=limits)
    except ValidationError as error:
        raise _first_problem(error, item, param) from error


def _check_lengths(item: dict[str, Any], param: str, limits: RequestLimits) -> None:
    """Check lengths, since validation would traverse long texts and lists and list all their errors."""
    _check_fields(item, param)
    for field, value in item.items():
        if isinstance(value, dict):
            _check_fields(value, f"{param}.{field}")
    _check_list(item.get("at"), f"{param}.at", limits.max_points_per_op)
    for field in _LISTS_WITH_LIMITS:
        _check_list(item.get(field), f"{param}.{field}", limits.max_list_items)
    where = item.get("where")
    exclude = where.get("exclude") if isinstance(where, dict) else None
    for clause, path in ((where, f"{param}.where"), (exclude, f"{param}.where.exclude")):
        if isinstance(clause, dict):
            _check_fields(clause, path)
            for field in _WHERE_LISTS:
                _check_list(clause.get(field), f"{path}.{field}", limits.max_list_items)


def _check_fields(value: dict[str, Any], param: str) -> None:
    if len(value) > _MAX_FIELDS:
        raise ApiError(
            ErrorCode.INVALID_SHAPE,
            f"An object here has at most {_MAX_FIELDS} fields, got {len(value)}.",
            param,
        )


def _check_list(value: object, param: str, max_items: int) -> None:
    if isinstance(value, list) and len(value) > max_items:
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"This list may have {max_items} items, got {len(value)}.", param
        )


def _first_problem(error: ValidationError, item: dict[str, Any], param: str) -> ApiError:
    """Return the first of pydantic's errors as an ApiError; further ones would add little."""
    problem = error.errors(include_url=False)[0]
    kind, location = problem["type"], problem["loc"]
    path = path_in(item, location, keep_last=kind == "missing")
    if kind in _OUR_CODES:
        field = problem.get("ctx", {}).get("field", "")
        code = ErrorCode(kind)
        message = f"{problem['msg']}."
        path = [*path, *field.split(".")] if field else path
    else:
        code = _CODES.get(kind, ErrorCode.INVALID_SHAPE)
        if kind == "literal_error" and path:
            code = _LITERAL_CODES.get(path[-1], code)
        got = "" if kind == "missing" else f", got {excerpt(problem['input'])}"
        field = f"`{'.'.join(path)}` of " if path else ""
        hint = next((f" {_FORMS[part]}" for part in reversed(path) if part in _FORMS), "")
        message = f"{field}an operation `{item['op']}`: {problem['msg']}{got}.{hint}"
    return ApiError(code, message, ".".join([param, *path]))


def path_in(item: object, location: Sequence[int | str], *, keep_last: bool) -> list[str]:
    """Return the location as a path in the request, without the tags of pydantic's unions.

    ``keep_last`` keeps its last part, which names a field that the request lacks.
    """
    path: list[str] = []
    value: Any = item
    for index, part in enumerate(location):
        if _has_item(value, part):
            value = value[part]
        elif not (keep_last and index == len(location) - 1):
            continue
        path.append(clip(str(part)))
    return path


def _has_item(value: object, part: int | str) -> bool:
    """Return whether a part of a location leads into a value; tags of unions lead nowhere."""
    if isinstance(value, list | tuple):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value
