"""The text of each token, and the token of a text: one is the other's inverse.

A tokenizer's ``decode`` of one token does not identify it (SentencePiece drops the blank before a word, a
part of a character becomes U+FFFD), and its ``encode`` of a word is not a lookup. So texts are made from the
vocabulary's own entries: the text that the token adds in the middle of a text, " Paris" for ``▁Paris`` and
``ĠParis``, and bytes that form no whole character as ``<0xE2><0x80>``; if another token has that text, the
entry, ``▁Paris``; if that is taken too, the text is too long, or there is no such token, ``<token 7042>``.

A text names the token whose text it is, else the token whose entry it is; of several, an added one (a special
token), else one of more than a byte.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

MAX_CHARACTERS: Final = 256
"""The maximum length of a token's text, in characters: the limit of a string in a request."""

_BLANK: Final = "▁"
"""A blank in vocabularies in SentencePiece's format."""

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_NUMBER: Final = re.compile(r"<token ([0-9]{1,18})>")
_MAX_SHOWN: Final = 8
_UNKNOWN_BYTES: Final = "nnsight_engine.unknown_bytes"


class Tokenizer(Protocol):
    """The part of the interface of the tokenizers of the transformers library that is used here."""

    def get_vocab(self) -> dict[str, int]: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class NoSuchTokenError(LookupError):
    """A text is not exactly one token."""


class TokenTexts:
    """Texts and tokens of one tokenizer; its vocabulary is read once, on first use: that takes a while."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return a token's text; only those of ids in the vocabulary are kept, there is no end of others."""
        known = self._texts.get(token_id)
        if known is not None:
            return known
        text = self._found_text(token_id)
        if token_id in self._entries:
            self._texts[token_id] = text
        return text

    def _found_text(self, token_id: int) -> str:
        """Return the first text for a token that names no other: its own, its entry, or its number."""
        entry = self._entries.get(token_id)
        named = () if entry is None else (self._plain(token_id, entry), entry)
        # With leading zeros if another token has that text.
        numbered = (f"<token {'0' * zeros}{token_id}>" for zeros in itertools.count())
        fitting = (text for text in itertools.chain(named, numbered) if 0 < len(text) <= MAX_CHARACTERS)
        return next(text for text in fitting if self._find(text) == token_id)

    def token(self, text: str) -> int:
        """Return the id of the token that a text names; raise NoSuchTokenError if it names none."""
        token_id = self._find(text)
        if token_id is None:
            raise NoSuchTokenError(self._explained(text))
        return token_id

    def _find(self, text: str) -> int | None:
        """Return the id of the token that a text names; None if it names none."""
        for entry in self._candidates(text):
            token_id = self._vocabulary.get(entry)
            if token_id is not None and self._plain(token_id, entry) == text:
                return token_id
        if text in self._vocabulary:
            return self._vocabulary[text]
        numbered = _NUMBER.fullmatch(text)
        return int(numbered[1]) if numbered else None

    def _plain(self, token_id: int, entry: str) -> str:
        """Return the text that a vocabulary's entry adds in the middle of a text."""
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
        """Yield the entries whose text this may be, the likeliest first."""
        yield text  # an added token, or one without blanks
        if self._is_byte_level:
            yield _entry_of_bytes(text.encode("utf-8", "surrogatepass"))
            yield _entry_of_bytes(_escaped_bytes(text))
        elif self._has_blanks:
            yield text.replace(" ", _BLANK)
            if len(text) == 1 and ord(text) < 0x80:
                yield f"<0x{ord(text):02X}>"

    def _explained(self, text: str) -> str:
        """Return why a text names no token, as the end of a sentence: what it is for the tokenizer."""
        known = text.encode("utf-8", "replace").decode()  # tokenizers reject a lone surrogate
        ids = self._tokenizer.encode(known, add_special_tokens=False)
        shown = ", ".join(repr(self.text(token_id)) for token_id in ids[:_MAX_SHOWN])
        more = ", …" if len(ids) > _MAX_SHOWN else ""
        if not ids:
            return "is no token for the tokenizer"
        number = "1 token" if len(ids) == 1 else f"{len(ids)} tokens"
        return f"is {number} for the tokenizer: {shown}{more}"

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
    """Return the characters for bytes: printable Latin-1 for itself, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


@functools.cache
def _character_bytes() -> Mapping[str, int]:
    return {character: byte for byte, character in _byte_characters().items()}


def _text_of_bytes(entry: str) -> str:
    """Return the text of a byte-level entry, in which each character stands for a byte."""
    known = _character_bytes()
    if any(character not in known for character in entry):
        return entry
    return bytes(known[character] for character in entry).decode("utf-8", _UNKNOWN_BYTES)


def _entry_of_bytes(data: bytes) -> str:
    characters = _byte_characters()
    return "".join(characters[byte] for byte in data)


def _escaped_bytes(text: str) -> bytes:
    """Return the bytes of a text in which ``<0xE2>`` stands for a byte that is no whole character."""
    parts = _BYTE.split(text)
    return b"".join(
        bytes([int(part, 16)]) if at % 2 else part.encode("utf-8", "surrogatepass")
        for at, part in enumerate(parts)
    )


def _show_bytes(error: UnicodeError) -> tuple[str, int]:
    """Write bytes that form no character as ``<0xE2>``: a handler of errors for ``bytes.decode``."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(f"<0x{byte:02X}>" for byte in unknown), error.end


codecs.register_error(_UNKNOWN_BYTES, _show_bytes)
