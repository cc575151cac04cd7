"""One model of OpenAI's list of models, of a server or of a front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode, clip

MODELS: Final = "/v1/models"


def model_of(listed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a model of the caller's list; raises ApiError ``model_not_found``."""
    for card in listed["data"]:
        if card["id"] == name:
            found: dict[str, Any] = card
            return found
    raise ApiError(
        ErrorCode.MODEL_NOT_FOUND,
        f"The model {clip(name)!r} does not exist, or is not yours; GET {MODELS} lists the names.",
        "model",
    )
