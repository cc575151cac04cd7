"""Labels of features, as clients send them: a JSON object ``{"123": "dogs"}``, or CSV with ``id,label``."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from api_schemas.dictionaries import MAX_LABEL_CHARACTERS
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip, excerpt

CSV_TYPE: Final = "text/csv"
_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_STRING: Final = re.compile(rb'"(?P<key>(?:[^"\\]|\\.)*)"(?P<colon>\s*:)?', re.DOTALL)
"""A string of JSON; in an object of strings, those before a colon are the keys."""
_CELLS: Final = ("id", "label")


def is_json(content: bytes | bytearray) -> bool:
    return content[:256].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{"


def labels_of_object(
    value: Mapping[str, Any], content: bytes, num_features: int, param: str | None
) -> dict[int, str]:
    """Return labels by id, without empty ones; raises ApiError ``invalid_labels``.

    ``content`` is the JSON that ``value`` was parsed from: a key may be twice in it.
    """
    labels = _checked(value.items(), num_features, param)
    keys = [one["key"] for one in _STRING.finditer(content) if one["colon"]]
    if len(keys) != len(value):
        key = next((key for key, count in Counter(keys).items() if count > 1), b"one")
        raise _invalid(f"A feature has one label; {clip(key.decode())} is there twice.", param)
    return labels


def labels_of_csv(content: bytes, num_features: int, param: str | None) -> dict[int, str]:
    """Return labels by id, without empty ones, of CSV in UTF-8; raises ApiError ``invalid_labels``."""
    try:
        rows = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        return _checked(_pairs(rows, param), num_features, param)
    except (UnicodeDecodeError, csv.Error) as error:
        raise _invalid(f"Labels are a JSON object, or CSV in UTF-8: {clip(str(error))}.", param) from error


def _pairs(rows: Iterable[list[str]], param: str | None) -> Iterable[tuple[str, str]]:
    for index, row in enumerate(rows):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (index == 0 and tuple(cell.lower() for cell in cells) == _CELLS):
            continue
        if len(cells) != len(_CELLS):
            raise _invalid(
                f"Each line of CSV has an id and a label; line {index + 1} has {len(cells)} cells. A label "
                "with a comma stands in quotes.",
                param,
            )
        yield cells[0], cells[1]


def _checked(pairs: Iterable[tuple[str, Any]], num_features: int, param: str | None) -> dict[int, str]:
    labels: dict[int, str] = {}
    for key, text in pairs:
        feature = int(key) if _ID.fullmatch(key) else -1
        if not 0 <= feature < num_features:
            raise _invalid(
                f"A label's id is a feature from 0 to {num_features - 1}, got {clip(key)!r}.", param
            )
        if not isinstance(text, str):
            raise _invalid(f"A label is text; that of {feature} is {excerpt(text)}.", param)
        label = " ".join(text.split())
        if len(label) > MAX_LABEL_CHARACTERS or "\0" in label:
            raise _invalid(
                f"A label has at most {MAX_LABEL_CHARACTERS} characters, and no NUL; that of {feature} has "
                f"{len(label)}.",
                param,
            )
        if feature in labels:
            raise _invalid(f"A feature has one label; {feature} is there twice.", param)
        if label:
            labels[feature] = label
    return labels


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(ErrorCode.INVALID_LABELS, message, param)


__all__ = ["CSV_TYPE", "is_json", "labels_of_csv", "labels_of_object"]
