"""The media parts of a conversation in a client's body, whichever route it is sent to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from api_schemas.interventions import FIELD

_CONTENT: Final = "content"
_NO_CONVERSATION: Final = ("tools", "chat_template_kwargs", FIELD)
"""Fields in which nothing is taken for media: templates render them as text, or they are not vLLM's."""
_SOURCES: Final = {
    "image_url": ("image_url", "url"),
    "input_image": ("image_url", "url"),
    "video_url": ("video_url", "url"),
    "audio_url": ("audio_url", "url"),
    "input_audio": ("input_audio", "data"),
    "image": ("source", "data"),
}
"""By the type of a part: the field that has its URL or its data, and the name of both inside of an object."""


def content_parts(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in fields.items():
        if name == _CONTENT and isinstance(value, list):
            yield from (part for part in value if isinstance(part, dict))
        if name not in _NO_CONVERSATION:
            yield from _parts_in(value)


def _parts_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield from content_parts(value)
    elif isinstance(value, list):
        for one in value:
            if isinstance(one, dict | list):
                yield from _parts_in(one)


def num_media_characters(fields: Mapping[str, Any]) -> int:
    """Return the size of the media in a body, which are decoded and never tokenized."""
    return sum(map(_num_characters, content_parts(fields)))


def _num_characters(part: Mapping[str, Any]) -> int:
    kind = part.get("type")
    place = _SOURCES.get(kind) if isinstance(kind, str) else None
    if place is None:
        return 0
    given, inner = part.get(place[0]), place[1]
    source = given.get(inner) if isinstance(given, dict) else given
    return len(source) if isinstance(source, str) else 0
