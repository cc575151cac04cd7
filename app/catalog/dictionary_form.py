"""The form of ``POST /v1/dictionaries``, read while it arrives: the weights go to disk, the rest to memory.

The body is parsed in pieces, each in a thread, and is never held as a whole. The size of each part is bounded
while it arrives, and weights that are a pickle are refused at their first bytes.

Labels of features, as clients send them: a JSON object ``{"123": "dogs"}``, or CSV with ``id,label``.
"""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api_schemas.dictionaries import MAX_LABEL_CHARACTERS
from api_schemas.errors import ApiError, ErrorCode, clip, excerpt
from app.formats.uploads import FORM_TYPE
from app.http.bodies import BodyLimits, check_media_type, stream_bytes
from app.http.contexts import context_of
from app.storage.dictionary_files import WeightsUpload
from app.storage.open_files import in_pieces
from nnsight_engine.features.weights_file import refuse_pickle

WEIGHTS: Final = "weights"
MAX_CFG_BYTES: Final = 256 * 1024
MAX_LABELS_BYTES: Final = 32 * 1024 * 1024
_MAX_FIELD_BYTES: Final = 4096
_SLACK_BYTES: Final = 64 * 1024
_BEGINNING_BYTES: Final = 9
_MAX_PART_BYTES: Final = {
    "cfg": MAX_CFG_BYTES,
    "labels": MAX_LABELS_BYTES,
    "name": _MAX_FIELD_BYTES,
    "at": _MAX_FIELD_BYTES,
    "output_at": _MAX_FIELD_BYTES,
    "shared": _MAX_FIELD_BYTES,
}
"""The largest size of each part beside the weights."""


async def read_form(request: Request, upload: WeightsUpload, limits: BodyLimits) -> dict[str, bytes]:
    """Write the weights of a form, whose body has not been read, to ``upload``; return its other parts.

    Raises ApiError, or ClientDisconnect if the client left before the end of the body.
    """
    check_media_type(request, FORM_TYPE)
    form = _FormParser(request.headers["content-type"], upload, limits.max_bytes)
    received, num_counted = context_of(request.scope).received, 0
    max_bytes = limits.max_bytes + sum(_MAX_PART_BYTES.values()) + _SLACK_BYTES
    async for piece in in_pieces(stream_bytes(request, max_bytes, limits.idle_s)):
        upload.spending.add(len(piece))
        await asyncio.to_thread(form.parse, piece)
        # Only what is held in memory is counted as received.
        if received is not None and form.num_held > num_counted:
            received.add(form.num_held - num_counted)
            num_counted = form.num_held
    return await asyncio.to_thread(form.finish)


class _FormParser:
    """A form being parsed; methods run in threads, one at a time."""

    def __init__(self, content_type: str, upload: WeightsUpload, max_weights_bytes: int) -> None:
        _, options = parse_options_header(content_type.encode("latin-1"))
        try:
            self._parser = MultipartParser(
                options.get(b"boundary", b""),
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except (FormParserError, ValueError) as error:
            raise _bad_form(f"The form is broken: {clip(str(error))}.") from error
        if not options.get(b"boundary"):
            raise _bad_form("A form's content type needs a boundary.")
        self._upload = upload
        self._max_weights_bytes = max_weights_bytes
        self._parts: dict[str, bytearray] = {}
        self._header, self._value = bytearray(), bytearray()
        self._name, self._file_name = "", ""
        self._beginning = bytearray()
        self._has_weights = self._has_ended = False
        self.num_held = 0

    def parse(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _bad_form(f"The form is broken: {clip(str(error))}.") from error

    def finish(self) -> dict[str, bytes]:
        try:
            self._parser.finalize()
        except FormParserError as error:
            raise _bad_form(f"The form is broken: {clip(str(error))}.") from error
        if not self._has_ended:
            raise _bad_form("The form ends before its last boundary.")
        if not self._has_weights or not self._upload.num_bytes:
            raise _bad_form("A dictionary's form needs a file, in the field `weights`; and `cfg` and `name`.")
        self._upload.finish()
        return {name: bytes(part) for name, part in self._parts.items()}

    def _on_part_begin(self) -> None:
        self._header, self._value = bytearray(), bytearray()
        self._name, self._file_name = "", ""

    def _on_header_field(self, data: bytes, start: int, stop: int) -> None:
        self._header += data[start:stop]

    def _on_header_value(self, data: bytes, start: int, stop: int) -> None:
        self._value += data[start:stop]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            self._file_name = options.get(b"filename", b"").decode("utf-8", "replace")
        self._header, self._value = bytearray(), bytearray()

    def _on_headers_finished(self) -> None:
        name = self._name
        is_twice = self._has_weights if name == WEIGHTS else name in self._parts
        if is_twice or (name != WEIGHTS and name not in _MAX_PART_BYTES):
            fields = ", ".join((WEIGHTS, *_MAX_PART_BYTES))
            raise _bad_form(f"A dictionary's form has the fields {fields}, each once; got {clip(name)!r}.")
        if name == WEIGHTS:
            self._has_weights = True
            refuse_pickle(self._file_name, b"")
        else:
            self._parts[name] = bytearray()

    def _on_part_data(self, data: bytes, start: int, stop: int) -> None:
        if self._name == WEIGHTS:
            self._on_weights(memoryview(data)[start:stop])
            return
        part = self._parts[self._name]
        max_bytes = _MAX_PART_BYTES[self._name]
        if len(part) + stop - start > max_bytes:
            raise ApiError(
                ErrorCode.BODY_TOO_LARGE,
                f"The field `{self._name}` of a dictionary's form has at most {max_bytes} bytes.",
                self._name,
            )
        part += data[start:stop]
        self.num_held += stop - start

    def _on_weights(self, data: memoryview) -> None:
        """Write a part of the weights to disk; refuse a pickle once enough of the beginning is there."""
        if self._upload.num_bytes + len(data) > self._max_weights_bytes:
            raise ApiError(
                ErrorCode.BODY_TOO_LARGE,
                f"The weights of a dictionary have at most {self._max_weights_bytes} bytes "
                "(max_dictionary_bytes).",
                WEIGHTS,
            )
        if len(self._beginning) < _BEGINNING_BYTES:
            self._beginning += data[:_BEGINNING_BYTES]
            if len(self._beginning) >= _BEGINNING_BYTES:
                refuse_pickle("", bytes(self._beginning))
        self._upload.write(data)

    def _on_part_end(self) -> None:
        self._name = ""

    def _on_end(self) -> None:
        self._has_ended = True


def _bad_form(message: str) -> ApiError:
    return ApiError(ErrorCode.BAD_REQUEST, message)


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
    labels = _checked_labels(value.items(), num_features, param)
    keys = [match["key"] for match in _STRING.finditer(content) if match["colon"]]
    if len(keys) != len(value):
        key = next((key for key, count in Counter(keys).items() if count > 1), b"one")
        raise _invalid_labels(f"A feature has one label; {clip(key.decode())} is there twice.", param)
    return labels


def labels_of_csv(content: bytes, num_features: int, param: str | None) -> dict[int, str]:
    """Return labels by id, without empty ones, of CSV in UTF-8; raises ApiError ``invalid_labels``."""
    try:
        rows = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        return _checked_labels(_pairs_of_rows(rows, param), num_features, param)
    except (UnicodeDecodeError, csv.Error) as error:
        raise _invalid_labels(
            f"Labels are a JSON object, or CSV in UTF-8: {clip(str(error))}.", param
        ) from error


def _pairs_of_rows(rows: Iterable[list[str]], param: str | None) -> Iterable[tuple[str, str]]:
    """Yield the id and the label of each row of CSV, without empty rows and a header."""
    for index, row in enumerate(rows):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (index == 0 and tuple(cell.lower() for cell in cells) == _CELLS):
            continue
        if len(cells) != len(_CELLS):
            raise _invalid_labels(
                f"Each line of CSV has an id and a label; line {index + 1} has {len(cells)} cells. A label "
                "with a comma stands in quotes.",
                param,
            )
        yield cells[0], cells[1]


def _checked_labels(pairs: Iterable[tuple[str, Any]], num_features: int, param: str | None) -> dict[int, str]:
    """Return labels by feature, white space collapsed, without empty ones; ApiError ``invalid_labels``."""
    labels: dict[int, str] = {}
    for key, text in pairs:
        feature = int(key) if _ID.fullmatch(key) else -1
        if not 0 <= feature < num_features:
            raise _invalid_labels(
                f"A label's id is a feature from 0 to {num_features - 1}, got {clip(key)!r}.", param
            )
        if not isinstance(text, str):
            raise _invalid_labels(f"A label is text; that of {feature} is {excerpt(text)}.", param)
        label = " ".join(text.split())
        if len(label) > MAX_LABEL_CHARACTERS or "\0" in label:
            raise _invalid_labels(
                f"A label has at most {MAX_LABEL_CHARACTERS} characters, and no NUL; that of {feature} has "
                f"{len(label)}.",
                param,
            )
        if feature in labels:
            raise _invalid_labels(f"A feature has one label; {feature} is there twice.", param)
        if label:
            labels[feature] = label
    return labels


def _invalid_labels(message: str, param: str | None) -> ApiError:
    return ApiError(ErrorCode.INVALID_LABELS, message, param)
