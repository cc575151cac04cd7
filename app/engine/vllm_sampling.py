"""Validation of a client's sampling parameters before vLLM receives them.

vLLM validates their values but, outside its own HTTP models, not their types; and values that cannot be
serialized for the engine's process fail only on the way there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from app.engine.vllm_errors import translated
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.vllm_backend.sender_usage import SENDER_KEY
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY

_DERIVED: Final = frozenset({"skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"})
"""Fields set by vLLM or by us; a client's SamplingParams object includes them."""

_RESERVED: Final = frozenset({PLAN_KEY, SENDER_KEY, TRACE_KEY})
_PLACE: Final = re.compile(r"`\$([^`]*)`")
"""The path in msgspec's messages."""

_Scalar = str | int | float | bool
_EXTRA: Final = dict[str, _Scalar | list[_Scalar] | None]


def sampling_params(given: Mapping[str, Any], field: str) -> SamplingParams:
    """Raise ApiError if a parameter is unknown, or has a wrong type or value."""
    named = {name: value for name, value in given.items() if not (name in _DERIVED or name.startswith("_"))}
    unknown = named.keys() - set(SamplingParams.__struct_fields__)
    if unknown:
        name = min(unknown)
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"vLLM has no sampling parameter {clip(name)!r}; its class SamplingParams has them.",
            f"{field}.sampling.{clip(name)}",
        )
    structured = named.get("structured_outputs")
    if isinstance(structured, dict):
        own = {name: value for name, value in structured.items() if not name.startswith("_")}
        named["structured_outputs"] = own
    try:
        _check_extra(named.get("extra_args"), field)
        msgspec.msgpack.encode(named)  # values that this refuses would fail on the way to the engine
        params: SamplingParams = msgspec.convert(named, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        named_there = "" if place is None else place[1]
        raise ApiError(ErrorCode.INVALID_VALUE, str(error), f"{field}.sampling{named_there}") from error
    except VLLMClientError as error:
        raise translated(error, field, named) or error from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ApiError(ErrorCode.INVALID_VALUE, str(error), f"{field}.sampling") from error
    return params


def _check_extra(extra: Any, field: str) -> None:
    if extra is None:
        return
    reserved = msgspec.convert(extra, _EXTRA).keys() & _RESERVED
    if reserved:
        raise ApiError(
            ErrorCode.BAD_REQUEST,
            f"extra_args may not name {min(reserved)!r}, which is the server's own",
            f"{field}.sampling.extra_args",
        )
