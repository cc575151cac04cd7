"""Model output on a terminal: control characters removed, differences marked."""

from __future__ import annotations

import difflib
import re
from typing import Final

from rich.text import Text

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARKS: Final = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}
_UNCLEAR: Final = re.compile(rf"{_CONTROLS.pattern}|[{''.join(_MARKS.values())}]|\\(?=u[0-9a-f]{{4}})")
_PIECES: Final = re.compile(r"\s*\S+|\s+")
"""Words, each with the whitespace before it."""
_MAX_LIVE_WORDS: Final = 500
"""Maximum length of texts that are compared while they are streamed; longer ones are compared at their end.
"""
MARK: Final = "bold underline bright_yellow"


def plain(text: str) -> str:
    """Return a text without characters that would move a cursor or change colours or text direction.

    A model's output is untrusted and may contain escape sequences. Carriage returns are removed, so that a
    line's end is the same however the text is split into pieces.
    """
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))


def visible(token: str) -> str:
    """Return a token on one line: ``·`` for a space, ``↵`` and ``␍`` for a line's end, ``⇥`` for a tab.

    Two different tokens never look alike: control characters, and characters that equal one of these marks,
    are written as ``\\u00b7``.
    """
    text = _UNCLEAR.sub(lambda match: _MARKS.get(match[0]) or f"\\u{ord(match[0]):04x}", token)
    return "".join(_MARKS.get(character, character) for character in text)


def with_differences(baseline: str, steered: str, *, is_done: bool) -> tuple[Text, Text]:
    """Return both texts, with the words marked that differ; whitespace is not compared.

    Unless ``is_done``, nothing is marked beyond the end of the shorter one, and nothing at all in long texts.
    """
    baseline_pieces, steered_pieces = _PIECES.findall(plain(baseline)), _PIECES.findall(plain(steered))
    num_compared = (
        max(len(baseline_pieces), len(steered_pieces))
        if is_done
        else min(len(baseline_pieces), len(steered_pieces))
    )
    if not is_done and num_compared > _MAX_LIVE_WORDS:
        return Text("".join(baseline_pieces)), Text("".join(steered_pieces))
    words, other_words = (
        [piece.lstrip() for piece in pieces[:num_compared]] for pieces in (baseline_pieces, steered_pieces)
    )
    matcher = difflib.SequenceMatcher(None, words, other_words, autojunk=num_compared > _MAX_LIVE_WORDS)
    marked_baseline, marked_steered = Text(), Text()
    for tag, start, stop, other_start, other_stop in matcher.get_opcodes():
        style = "" if tag == "equal" else MARK
        _append(marked_baseline, baseline_pieces[start:stop], style)
        _append(marked_steered, steered_pieces[other_start:other_stop], style)
    marked_baseline.append("".join(baseline_pieces[num_compared:]))
    marked_steered.append("".join(steered_pieces[num_compared:]))
    return marked_baseline, marked_steered


def _append(text: Text, pieces: list[str], style: str) -> None:
    """Append pieces of a text, whose words but not their whitespace get the style."""
    for piece in pieces:
        word = piece.lstrip()
        text.append(piece.removesuffix(word))
        text.append(word, style)
