"""Validation of prompts of token ids as a whole, before code that examines each id."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode

_FIELD: Final = "prompt"
_TRUNCATE: Final = "truncate_prompt_tokens"
_FORMS: Final = ({int}, {str}, {list})


def check_prompts(body: Mapping[str, Any], max_model_len: int) -> None:
    """Check the type and the length of a completion's prompts.

    vLLM checks both too, but id by id, and reports each one that is wrong.

    Raises:
        ApiError: ``invalid_value``.
    """
    prompt = body.get(_FIELD)
    if not isinstance(prompt, list) or not prompt:
        return
    kinds = set(map(type, prompt))
    inner = set(map(type, chain.from_iterable(prompt))) if kinds == {list} else {int}
    if kinds not in _FORMS or not inner <= {int}:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists.",
            _FIELD,
        )
    longest = len(prompt) if kinds == {int} else max(map(len, prompt)) if kinds == {list} else 0
    if longest > max_model_len and body.get(_TRUNCATE) is None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A prompt may have {max_model_len} tokens with its answer, got {longest}; send a shorter one, "
            f"or {_TRUNCATE}.",
            _FIELD,
        )


__all__ = ["check_prompts"]
