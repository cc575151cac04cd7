"""The text of each token, and the token of a text: one is the other's inverse.

A tokenizer's ``decode`` of one token is no name for it: it drops the blank before a word (SentencePiece),
and makes U+FFFD of each part of a character. Its ``encode`` of a word is no lookup: it puts blanks before
words and splits what the vocabulary has whole. So texts are made from the vocabulary's own entries:

- the text that the token adds to a text that goes on, " Paris" for ``▁Paris`` and ``ĠParis``; bytes that
  are no whole character as ``<0xE2><0x80>``;
- where another token has that text, the vocabulary's entry, ``▁Paris``;
- where that is another token's text too, the text is too long to send, or the vocabulary has no such token,
  ``<token 7042>``.

A text names the token whose text it is, else the token whose entry it is. Whatever a tokenizer's vocabulary
is, the text shown for a token therefore names that token. Of tokens with one text, it names an added one (a
special token), else one of more than a byte. Admission asks for tokens of texts, answers for texts of tokens.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

MAX_CHARACTERS: Final = 256
"""Of a string in a request."""

_BLANK: Final = "▁"
"""A blank in vocabularies of SentencePiece's form."""

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_NUMBER: Final = re.compile(r"<token ([0-9]{1,18})>")
_MAX_SHOWN: Final = 8
_UNKNOWN_BYTES: Final = "nnsight_engine.unknown_bytes"


class Tokenizer(Protocol):
    """What is asked of a tokenizer of the transformers library."""

    def get_vocab(self) -> dict[str, int]:
        """Return ids by entry."""

    def get_added_vocab(self) -> dict[str, int]:
        """Return ids of tokens that were added to the vocabulary."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's tokens."""


class NoSuchTokenError(LookupError):
    """A text is not exactly one token."""


class TokenTexts:
    """Tokens of one tokenizer by their texts, and the other way round.

    Args:
        tokenizer: The tokenizer; its vocabulary is read once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read nothing yet: large vocabularies take a while."""
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """Return the text that names a token; see the module."""
        entry = self._entries.get(token_id)
        named = () if entry is None else (self._plain(token_id, entry), entry)
        # With zeros before it, should another token have that text.
        numbered = (f"<token {'0' * zeros}{token_id}>" for zeros in itertools.count())
        fitting = (one for one in itertools.chain(named, numbered) if 0 < len(one) <= MAX_CHARACTERS)
        return next(one for one in fitting if self._find(one) == token_id)

    def token(self, text: str) -> int:
        """Return the id of the token that a text names.

        Raises:
            NoSuchTokenError: It names none.
        """
        found = self._find(text)
        if found is None:
            raise NoSuchTokenError(self._explained(text))
        return found

    def _find(self, text: str) -> int | None:
        for entry in self._candidates(text):
            token_id = self._vocabulary.get(entry)
            if token_id is not None and self._plain(token_id, entry) == text:
                return token_id
        if text in self._vocabulary:
            return self._vocabulary[text]
        numbered = _NUMBER.fullmatch(text)
        return int(numbered[1]) if numbered else None

    def _plain(self, token_id: int, entry: str) -> str:
        """Return what a token adds to a text that goes on."""
        if token_id in self._added:
            return entry
        if self._is_byte_level:
            return _text_of_bytes(entry)
        if not self._has_blanks:
            return entry
        byte = _BYTE.fullmatch(entry)
        if byte is not None:
            value = int(byte[1], 16)
            return chr(value) if value < 0x80 else entry
        return entry.replace(_BLANK, " ")

    def _candidates(self, text: str) -> Iterator[str]:
        """Return the entries whose text this may be, those first that are to have it."""
        yield text  # an added token, or one without blanks
        if self._is_byte_level:
            yield _entry_of_bytes(text.encode("utf-8", "surrogatepass"))
            yield _entry_of_bytes(_escaped_bytes(text))
        elif self._has_blanks:
            yield text.replace(" ", _BLANK)
            if len(text) == 1 and ord(text) < 0x80:
                yield f"<0x{ord(text):02X}>"

    def _explained(self, text: str) -> str:
        known = text.encode("utf-8", "replace").decode()  # a lone surrogate is none for tokenizers
        ids = self._tokenizer.encode(known, add_special_tokens=False)
        shown = ", ".join(repr(self.text(token_id)) for token_id in ids[:_MAX_SHOWN])
        more = ", …" if len(ids) > _MAX_SHOWN else ""
        return f"is {len(ids)} for the tokenizer: {shown}{more}" if ids else "is none for the tokenizer"

    @functools.cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab()

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_vocab().values())

    @functools.cached_property
    def _entries(self) -> Mapping[int, str]:
        return {token_id: entry for entry, token_id in self._vocabulary.items()}

    @functools.cached_property
    def _decoder(self) -> str:
        """What the tokenizer makes texts with, as the ``tokenizers`` library describes it."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        return "" if decoder is None else bytes(decoder.__getstate__()).decode()

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in self._decoder

    @functools.cached_property
    def _has_blanks(self) -> bool:
        return _BLANK in self._decoder


@functools.cache
def _byte_characters() -> Mapping[int, str]:
    """Return the character that stands for each byte in vocabularies of bytes.

    A byte that is a printable character of Latin-1 is that, the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


@functools.cache
def _character_bytes() -> Mapping[str, int]:
    return {character: byte for byte, character in _byte_characters().items()}


def _text_of_bytes(entry: str) -> str:
    """Return the text of an entry of a vocabulary of bytes; the entry itself if it is none."""
    known = _character_bytes()
    if any(character not in known for character in entry):
        return entry
    return bytes(known[character] for character in entry).decode("utf-8", _UNKNOWN_BYTES)


def _entry_of_bytes(data: bytes) -> str:
    characters = _byte_characters()
    return "".join(characters[byte] for byte in data)


def _escaped_bytes(text: str) -> bytes:
    """Return the bytes of a text in which some are written as ``<0xE2>``."""
    parts = _BYTE.split(text)
    return b"".join(
        bytes([int(part, 16)]) if at % 2 else part.encode("utf-8", "surrogatepass")
        for at, part in enumerate(parts)
    )


def _show_bytes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(f"<0x{byte:02X}>" for byte in unknown), error.end


codecs.register_error(_UNKNOWN_BYTES, _show_bytes)

__all__ = ["MAX_CHARACTERS", "NoSuchTokenError", "TokenTexts", "Tokenizer"]
