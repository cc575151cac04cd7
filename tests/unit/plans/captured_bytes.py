"""The bytes that a request captures of its prompt, as the refusal of too many says."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import parse_interventions
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.request import compile_request


def captured_bytes(*raw: dict[str, Any], spec: ModelSpec, prompt: list[int]) -> int:
    """Return the bytes that a request asks for of a model that allows none."""
    try:
        compile_request(
            parse_interventions(list(raw)),
            spec=dataclasses.replace(spec, max_capture_bytes=0),
            prompt_token_ids=prompt,
            max_tokens=20,
            token_of=len,
            stream=False,
        )
    except ApiError as error:
        if error.code != ErrorCode.CAPTURE_TOO_LARGE:
            raise
        (num_bytes,) = re.findall(r"asks for (\d+)", error.message)
        return int(num_bytes)
    return 0
