"""The encodings of text that code may name: each other name would be kept by Python for ever, or is slow."""

from __future__ import annotations

from typing import Any, Final

from nnsight_engine.sandbox.restricted.budget import refusal

_CODECS: Final = frozenset(
    {
        "utf8", "ascii", "latin1", "iso88591", "utf16", "utf16le", "utf16be", "utf32", "utf32le", "utf32be",
    }
)  # fmt: skip
_ERRORS: Final = frozenset({"strict", "ignore", "replace", "backslashreplace", "surrogateescape"})


def check_codec(encoding: Any = "utf-8", errors: Any = "strict") -> None:
    """Refuse encodings and ways to treat errors that are not in the lists.

    Raises:
        SandboxError: One is not.
    """
    if type(encoding) is not str or _plain_name(encoding) not in _CODECS:
        raise refusal("this encoding", "there are utf-8, ascii, latin-1, utf-16 and utf-32")
    if type(errors) is not str or errors not in _ERRORS:
        raise refusal("this way to treat errors of an encoding", f"there are {', '.join(sorted(_ERRORS))}")


def _plain_name(encoding: str) -> str:
    return encoding[:32].lower().replace("-", "").replace("_", "")
