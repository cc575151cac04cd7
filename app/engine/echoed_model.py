"""The model's name in answers: clients expect the one that they sent, with the preset behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Final

from app.errors import DONE_FRAME
from app.json_text import json_text

_MODEL: Final = "model"
_DATA: Final = "data: "
_HOLDERS: Final = ("response", "message")
"""Objects of events that have the name: those of responses and of messages."""


def with_model(body: dict[str, Any], model: str | None) -> dict[str, Any]:
    if model is None:
        return body
    found = {name: with_model(body[name], model) for name in _HOLDERS if isinstance(body.get(name), dict)}
    return body | found | ({_MODEL: model} if _MODEL in body else {})


async def events_with_model(source: AsyncGenerator[str, None], model: str) -> AsyncGenerator[str, None]:
    try:
        async for event in source:
            if event.startswith(_DATA) and event != DONE_FRAME:
                body = with_model(json.loads(event.removeprefix(_DATA)), model)
                yield f"{_DATA}{json_text(body)}\n\n"
            else:
                yield event
    finally:
        await source.aclose()


__all__ = ["events_with_model", "with_model"]
