"""A form is taken apart with bounds of its own: the parser has none for this media type."""

from __future__ import annotations

from typing import Any

import pytest
from python_multipart.multipart import FormParser, create_form_parser

from api_schemas.errors import ApiError, ErrorCode
from app import forms

TYPE = "multipart/form-data; boundary=x"
FILE = '--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n'


def parts_of(body: bytes, content_type: str) -> tuple[dict[str, str], tuple[str, bytes]]:
    return forms.read_form(body, content_type, ("name", "at", "shared"), "a vector")


def field(name: str, value: str) -> str:
    return f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'


def test_a_form_is_its_fields_and_its_file() -> None:
    fields = {"name": "joy", "at": "layers.1.output", "shared": "true"}
    body = FILE + "".join(field(name, value) for name, value in fields.items()) + "--x--\r\n"
    assert parts_of(body.encode(), TYPE) == (fields, ("f", b"x"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (FILE + field("name", "a") * 2, "each once; got 'name'"),
        (FILE + field("other", "a"), "got 'other'"),
        (FILE + field("at", "a" * 100_000), "at most 65536 bytes; at has 100000"),
        (FILE * 2, "has one file"),
    ],
)
def test_too_many_fields_and_too_long_ones_are_refused(body: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parts_of(f"{body}--x--\r\n".encode(), TYPE)
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_the_parser_knows_every_option_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def create(headers: Any, on_field: Any, on_file: Any, config: dict[str, Any]) -> FormParser:
        given.update(config)
        return create_form_parser(headers, on_field, on_file, config)

    monkeypatch.setattr(forms, "create_form_parser", create)
    parts_of(f"{FILE}--x--\r\n".encode(), TYPE)
    assert given
    assert given.keys() <= FormParser.DEFAULT_CONFIG.keys()
