"""Checks of bodies that vLLM's handlers read: what would cost them too much, or run without limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD
from app.services.field_names import check_spelling
from app.vllm_routes import RESPONSES, VLLMRoute

MAX_OBJECTS: Final = 1000
"""Objects in the items, parts and tools of one response. vLLM's model tries some sixty classes for each."""
_MAX_PARTS: Final = 100
"""Objects in one item."""
_MAX_NAME: Final = 512
_MAX_CHARS_PER_TOKEN: Final = 32
_MAX_STORED: Final = 64 * 1024
_MAX_TEXTS: Final = 64
_LISTS: Final = ("input", "documents", "items", "text_1", "text_2", "data_1", "data_2", "queries")
"""Fields with several texts, each of which is a prompt or a part of one."""
_TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")


def check_body(route: VLLMRoute, fields: MutableMapping[str, Any], max_model_len: int) -> None:
    """Check a body.

    Args:
        route: The route.
        fields: The body; large responses are marked not to be stored.
        max_model_len: The number of tokens of the longest prompt with its answer.

    Raises:
        ApiError: It is not accepted.
    """
    if fields.get(FIELD) and not route.intervenes:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION, f"{route.path} takes no `{FIELD}`; leave it out.", FIELD
        )
    check_spelling(fields)
    others = [value for name, value in fields.items() if name != FIELD]
    num_characters = sum(map(len, _texts(others)))
    num_prompts = min(_num_texts(fields), _MAX_TEXTS) if route.has_many else 1
    most = max_model_len * _MAX_CHARS_PER_TOKEN * num_prompts
    if num_characters > most:  # vLLM tokenizes texts whole, on a thread that all requests share
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"The texts of this request to {route.path} may have {most} characters together, got "
            f"{num_characters}: the model's context has {max_model_len} tokens.",
        )
    extra = fields.get("vllm_xargs")
    for name in _TRANSFERS:
        if isinstance(extra, dict) and name in extra:
            raise _invalid(f"vllm_xargs.{name}", "is an object: send it as a field of its own")
    if route.path == RESPONSES:
        _check_response(fields)
        if num_characters > _MAX_STORED:
            fields["store"] = False


def _num_texts(fields: Mapping[str, Any]) -> int:
    """Return the number of texts that are prompts of their own, at least 1."""
    found = (fields.get(name) for name in _LISTS)
    return max([1, *(len(texts) for texts in found if isinstance(texts, list))])


def _check_response(fields: Mapping[str, Any]) -> None:
    if fields.get("background") is not None and fields["background"] is not False:
        raise _invalid("background", "is not supported: send it without, and stay connected")
    for name in ("user", "request_id", "prompt_cache_key", "previous_response_id"):
        given = fields.get(name)
        if isinstance(given, str) and len(given) > _MAX_NAME:
            raise _invalid(name, f"may have {_MAX_NAME} characters, got {len(given)}")
    nested = [fields.get(name) for name in ("input", "tools", "previous_input_messages", "include")]
    num_objects = sum(1 for _ in _objects(nested))
    if num_objects > MAX_OBJECTS:
        raise _invalid(
            "input", f"and `tools` may have {MAX_OBJECTS} objects together, got {num_objects}: join texts"
        )
    items = fields.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if sum(1 for _ in _objects(item)) > _MAX_PARTS:
            raise _invalid(f"input.{index}", f"may have {_MAX_PARTS} objects")


def _objects(value: Any) -> Iterator[Any]:
    """Yield the objects inside a value, and each item of its lists."""
    if isinstance(value, dict):
        yield value
        for one in value.values():
            yield from _objects(one)
    elif isinstance(value, list):
        for one in value:
            if not isinstance(one, dict | list):
                yield one
            yield from _objects(one)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)


def _invalid(name: str, text: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_VALUE, f"`{name}` {text}.", name)


__all__ = ["MAX_OBJECTS", "check_body"]
