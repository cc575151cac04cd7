"""Checks of bodies that vLLM's handlers read, for parts that would cost too much, or run without limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD
from app.media_parts import num_media_characters
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
_LISTS: Final = (
    "input", "messages", "documents", "items", "text_1", "text_2", "data_1", "data_2", "queries",
)  # fmt: skip
"""Fields with several texts, each of which is a prompt or a part of one."""
_TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")


def check_body(
    route: VLLMRoute, fields: MutableMapping[str, Any], max_model_len: int, max_texts: int
) -> None:
    """Raise ApiError for a body that is not accepted; large responses are marked not to be stored."""
    if fields.get(FIELD) and not route.intervenes:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION, f"{route.path} takes no `{FIELD}`; leave it out.", FIELD
        )
    check_spelling(fields)
    others = [value for name, value in fields.items() if name != FIELD]
    num_characters = sum(map(len, _texts(others))) - num_media_characters(fields)
    num_prompts = 1
    if route.has_many:
        _check_texts(fields, max_model_len, max_texts)
        num_prompts = min(num_texts(fields), _MAX_TEXTS)
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
        if sum(map(len, _texts(others, with_names=True))) > _MAX_STORED:
            fields["store"] = False


def is_in_background(route: VLLMRoute, fields: Mapping[str, Any]) -> bool:
    return route.path == RESPONSES and bool(fields.get("background"))


def check_in_background(fields: Mapping[str, Any], *, has_operations: bool) -> None:
    """Raise ApiError for a response in the background that streams, has operations, or is not stored."""
    others = {
        FIELD: (has_operations, "a stored response has no results"),
        "request_id": ("request_id" in fields, "its id is chosen by the server"),
        "stream": (bool(fields.get("stream")), "the events of one that is cancelled would never end"),
        "store": (
            fields.get("store", True) is not True,
            f"it is read later; texts, images and names in it may have {_MAX_STORED} characters together",
        ),
    }
    for name, (is_refused, reason) in others.items():
        if is_refused:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"`background` cannot be combined with this `{name}`: {reason}. Leave one of them out.",
                name,
            )


def num_texts(fields: Mapping[str, Any]) -> int:
    """Return the number of texts of a body that are prompts of their own, at least 1."""
    lists = [fields[name] for name in _LISTS if _kind_of(fields.get(name)) in {str, list}]
    return max([1, *map(len, lists)])


def _kind_of(texts: Any) -> type | None:
    """Return the type of a list's items: int for the ids of one prompt, dict for one conversation."""
    kinds = set(map(type, texts)) if isinstance(texts, list) else set()
    return kinds.pop() if len(kinds) == 1 else None


def _check_texts(fields: Mapping[str, Any], max_model_len: int, max_texts: int) -> None:
    for name in _LISTS:
        texts = fields.get(name)
        if not isinstance(texts, list) or not texts:
            continue
        kind = _kind_of(texts)
        inner = set(map(type, chain.from_iterable(texts))) if kind is list else set()
        if kind not in {str, int, dict, list} or not (inner <= {int} or inner == {dict}):
            raise _invalid(name, "must be a text, texts, ids, lists of ids, or messages")
        if kind is not int and len(texts) > max_texts:
            raise _invalid(name, f"may have {max_texts} items, got {len(texts)}; send several requests")
        longest = len(texts) if kind is int else max(map(len, texts)) if inner == {int} else 0
        if longest > max_model_len and fields.get("truncate_prompt_tokens") is None:
            raise _invalid(name, f"may have {max_model_len} ids for each text, got {longest}")


def _check_response(fields: Mapping[str, Any]) -> None:
    if not isinstance(fields.get("background", False), bool | None):
        raise _invalid("background", "must be true or false")
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
    if isinstance(value, dict):
        yield value
        for one in value.values():
            yield from _objects(one)
    elif isinstance(value, list):
        for one in value:
            if not isinstance(one, dict | list):
                yield one
            yield from _objects(one)


def _texts(value: Any, *, with_names: bool = False) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if with_names:
            yield from value
        yield from _texts(list(value.values()), with_names=with_names)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, with_names=with_names)


def _invalid(name: str, text: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_VALUE, f"`{name}` {text}.", name)


__all__ = ["MAX_OBJECTS", "check_body", "check_in_background", "is_in_background", "num_texts"]
