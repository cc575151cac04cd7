"""A form with a file, as OpenAI's clients send files: taken apart with bounds of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, create_form_parser

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip

FORM_TYPE: Final = "multipart/form-data"
FILE: Final = "file"
"""The name of the field with the file."""

_MAX_FIELD_BYTES: Final = 64 * 1024


def read_form(
    body: bytes, content_type: str, names: Collection[str], what: str
) -> tuple[dict[str, str], tuple[str, bytes]]:
    """Return a form's fields, and its file's name and content; errors are ``bad_request``.

    ``names`` are the fields that it may have; ``what`` is its purpose, for messages: ``a vector``.
    """
    fields: dict[str, str] = {}
    files: list[tuple[str, bytes]] = []
    form = f"The form of {what}"

    def on_field(field: Field) -> None:
        name = (field.field_name or b"").decode("utf-8", "replace")
        if name not in names or name in fields:
            known = ", ".join((FILE, *names))
            raise _wrong(f"{form} has the fields {known}, each once; got {clip(name)!r}.")
        value = field.value or b""
        if len(value) > _MAX_FIELD_BYTES:
            raise _wrong(f"A field of a form has at most {_MAX_FIELD_BYTES} bytes; {name} has {len(value)}.")
        fields[name] = value.decode("utf-8", "replace")

    def on_file(file: File) -> None:
        if file.field_name != FILE.encode() or files:
            raise _wrong(f"{form} has one file, in the field `{FILE}`.")
        file.file_object.seek(0)
        files.append(((file.file_name or b"").decode("utf-8", "replace"), file.file_object.read()))

    # The parser's limits on fields are not for forms of this media type: ours are above.
    config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
    try:
        parser = create_form_parser(
            {"Content-Type": content_type.encode("latin-1")}, on_field, on_file, config
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError, TypeError) as error:
        raise _wrong(f"The form is broken: {clip(str(error))}.") from error
    if not files:
        raise _wrong(f"{form} needs a file, in the field `{FILE}`.")
    return fields, files[0]


def _wrong(message: str) -> ApiError:
    return ApiError(ErrorCode.BAD_REQUEST, message)


__all__ = ["FILE", "FORM_TYPE", "read_form"]
