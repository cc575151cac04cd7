"""Misspellings of our fields, which vLLM would ignore."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.interventions import FIELD as INTERVENTIONS
from api_schemas.presets import FIELD as PRESET

_CLOSE: Final = 0.8
"""Minimum similarity (1: equal) of a field's name to ours for it to count as a misspelling."""
_MAX_NAMES: Final = 256
_MAX_EXTRA_CHARACTERS: Final = 4


def check_spelling(body: Mapping[str, Any]) -> None:
    """Raise ApiError ``invalid_shape`` for a misspelling of one of our fields."""
    for field in (INTERVENTIONS, PRESET):
        _check(body, field)


def _check(body: Mapping[str, Any], field: str) -> None:
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
