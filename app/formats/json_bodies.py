"""JSON of request bodies, bounded before it is parsed and before it is validated.

The nesting depth is checked before parsing, because the parser recurses. Numbers that JSON does not define
(NaN, infinities) are rejected while parsing. The number of values in a field is checked before validation,
which costs by values, not bytes: a megabyte of empty objects takes longer than a hundred of base64.

The media parts of a conversation in a client's body, whichever route it is sent to.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec
import numpy as np

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import FIELD

_QUOTE: Final = ord('"')
_HALVES: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escapes of surrogates. Valid JSON has them in pairs, for characters beyond U+FFFF."""
_IRRELEVANT: Final = bytes(set(range(256)) - set(b'[]{}"'))
_SCAN_CHUNK_BYTES: Final = 64 * 1024
_STEPS: Final = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_STEPS.setflags(write=False)


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse UTF-8 JSON whose depth is already checked; raise the errors of ``read_object``."""
    value: Any = None
    try:
        # A byte order mark is accepted, as json.loads does for bytes. UTF-16 is not, because the depth was
        # counted on single bytes.
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if _HALVES.search(body):
            # Raises for lone surrogates; paired ones were joined into characters.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            ErrorCode.INVALID_JSON,
            "A string of the body contains half of a character (a lone surrogate, such as "
            f"{error.object[error.start]!a}), which UTF-8 cannot encode; send complete characters.",
            _field_with_lone_surrogate(value),
        ) from error
    except ValueError as error:
        # Invalid UTF-8, invalid JSON and integers beyond Python's digit limit are all ValueError.
        raise ApiError(ErrorCode.INVALID_JSON, f"The body must be JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise ApiError(ErrorCode.JSON_TOO_DEEP, "The body's JSON is nested too deeply to parse.") from error
    if not isinstance(value, dict):
        raise ApiError(
            ErrorCode.INVALID_SHAPE, f"The body must be a JSON object, got {type(value).__name__}."
        )
    return value


def _field_with_lone_surrogate(body: Any) -> str | None:
    """Return the name of the first field that UTF-8 cannot encode, for the error."""
    for name, value in body.items() if isinstance(body, dict) else ():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return clip(name)
    return None


def check_depth(body: bytes | bytearray, max_depth: int) -> None:
    if exceeds_depth(body, max_depth):
        raise ApiError(
            ErrorCode.JSON_TOO_DEEP,
            f"Arrays and objects may nest {max_depth} deep, and the body goes deeper; flatten it.",
        )


def exceeds_depth(body: bytes | bytearray, max_depth: int) -> bool:
    """Return whether arrays and objects nest too deep, in linear time and in chunks of bounded memory.

    Counts brackets outside strings, up to the position at which a parser would report an error.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    # Escape pairs are removed first (in a run of backslashes they pair from the left); every remaining quote
    # then opens or closes a string.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    text = text.translate(None, _IRRELEVANT)
    depth, in_string = 0, 0
    for start in range(0, len(text), _SCAN_CHUNK_BYTES):
        chunk = np.frombuffer(text[start : start + _SCAN_CHUNK_BYTES], dtype=np.uint8)
        inside = (np.cumsum(chunk == _QUOTE, dtype=np.int32) + in_string) & 1
        depths = np.cumsum(_STEPS[chunk] * (1 - inside), dtype=np.int64) + depth
        if depths.max() > max_depth:
            return True
        depth, in_string = int(depths[-1]), int(inside[-1])
    return False


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(ErrorCode.NOT_FINITE, f"Numbers must be finite, got {name}; JSON has no such number.")


PROMPT: Final = "prompt"
_TENSOR_FIELDS: Final = frozenset({"interventions", "parts", "values", "vectors"})
"""Fields of bodies that are tensors, or have them at any depth."""
_HOLDERS: Final = frozenset({"interventions", "parts"})
"""Those of them that are no tensors, nor objects of them."""
_TENSOR_KEYS: Final = frozenset(
    {"hidden_bias", "hidden_weights", "mean", "scale", "values", "vector", "vectors", "weights"}
)
_MIN_NUMBERS: Final = 1024
"""Lists with fewer numbers are not converted."""
_MAX_RANK: Final = 3


MAX_JSON_DEPTH: Final = 64
"""Deepest nesting of arrays and objects in a request's JSON."""


class FieldLimits(msgspec.Struct, frozen=True):
    """Limits on the content of one body; ``max_prompt_ids`` counts all prompts together.

    ``max_objects`` counts objects and lists, and ``max_values`` the items in all of them, for each field.
    """

    max_depth: int
    max_objects: int
    max_values: int
    max_prompt_ids: int

    @property
    def min_bytes(self) -> int:
        """The size of a body below which no limit can be exceeded: an item has two characters at least."""
        return 2 * min(self.max_objects, self.max_values, self.max_prompt_ids)


def checked(body: dict[str, Any], limits: FieldLimits) -> dict[str, Any]:
    """Convert long lists of numbers to tensor objects, and check the counts; raises ApiError."""
    for name in _TENSOR_FIELDS & body.keys():
        body[name] = _with_tensors(body[name], name, is_tensor=name not in _HOLDERS)
    for name, value in body.items():
        if isinstance(value, dict | list):
            max_values = limits.max_prompt_ids if name == PROMPT else limits.max_values
            _check_count(name, value, limits.max_objects, max_values)
    return body


def _check_count(name: str, value: Any, max_objects: int, max_values: int) -> None:
    """Raise ApiError if a field has too many objects and lists, or too many items in them."""
    pending, num_objects, num_values = [value], 0, 0
    while pending:
        part = pending.pop()
        num_objects += 1
        num_values += len(part)
        if num_objects > max_objects:
            raise _too_many(name, "objects and lists", max_objects)
        if num_values > max_values:
            raise _too_many(name, "values", max_values)
        items = part.values() if isinstance(part, dict) else part
        pending += [item for item in items if isinstance(item, dict | list)]


def _too_many(name: str, unit: str, limit: int) -> ApiError:
    message = f"One field of a request may hold {limit} {unit}, and this one holds more; send less in it."
    return ApiError(ErrorCode.INVALID_VALUE, message, name)


def _with_tensors(value: Any, path: str, *, is_tensor: bool) -> Any:
    """Return a value of a body, whose depth is checked, with tensor objects for its long lists of numbers.

    ``path`` is for messages; ``is_tensor`` tells that a list at this place is one tensor.
    """
    if isinstance(value, dict):
        are_named = is_tensor and path == "vectors"
        return {
            key: _with_tensors(item, f"{path}.{key}", is_tensor=are_named or key in _TENSOR_KEYS)
            for key, item in value.items()
        }
    if not isinstance(value, list):
        return value
    if is_tensor:
        return _as_tensor(value, path)
    return [_with_tensors(item, f"{path}.{index}", is_tensor=False) for index, item in enumerate(value)]


def _as_tensor(value: list[Any], path: str) -> Any:
    """Return numbers, nested up to three deep, as a float32 tensor object; others are unchanged."""
    shape, rows = [len(value)], [value]
    while len(shape) < _MAX_RANK and {type(item) for row in rows for item in row} == {list}:
        rows = [item for row in rows for item in row]
        lengths = set(map(len, rows))
        if len(lengths) != 1:
            return value
        shape += lengths
    if math.prod(shape) < _MIN_NUMBERS:
        return value
    kinds = {type(item) for row in rows for item in row}
    if not kinds <= {float, int}:
        raise ApiError(
            ErrorCode.INVALID_VALUE, "A tensor is a list of numbers, or of lists of them, three deep.", path
        )
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(rows, dtype=np.float64).astype("<f4")
    except OverflowError:  # an integer too large for a float
        numbers = np.full(1, np.inf)
    if not np.isfinite(numbers).all():
        raise ApiError(ErrorCode.NOT_FINITE, "Numbers must be finite, in float32 too.", path)
    data = base64.b64encode(numbers.tobytes()).decode("ascii")
    return {"dtype": "float32", "shape": shape, "data": data, "encoding": "base64"}


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
    """Yield the parts of every list ``content`` in a body, at any depth, as messages have them."""
    for name, value in fields.items():
        if name == _CONTENT and isinstance(value, list):
            yield from (part for part in value if isinstance(part, dict))
        if name not in _NO_CONVERSATION:
            yield from _parts_in(value)


def _parts_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield from content_parts(value)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                yield from _parts_in(item)


def num_media_characters(fields: Mapping[str, Any]) -> int:
    """Return the size of the media in a body, which are decoded and never tokenized."""
    return sum(map(_num_characters, content_parts(fields)))


def _num_characters(part: Mapping[str, Any]) -> int:
    """Return the length of a part's URL or data; 0 for a part that is no media."""
    kind = part.get("type")
    keys = _SOURCES.get(kind) if isinstance(kind, str) else None
    if keys is None:
        return 0
    key, inner_key = keys
    media = part.get(key)
    source = media.get(inner_key) if isinstance(media, dict) else media
    return len(source) if isinstance(source, str) else 0
