"""Bounds on the text of a grammar, checked before anything compiles it, which can take minutes and gigabytes.

Grammars that pass are compiled within limits of time and memory (see ``grammars``), so the counts here may be
approximate. The checks take time linear in the text, whose length is checked first.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode

FIELD: Final = "structured_outputs"

_LISTS: Final = frozenset({"allOf", "anyOf", "enum", "oneOf"})
_PATTERNS: Final = frozenset({"ebnf", "grammar", "pattern", "regex"})
_VALUES: Final = frozenset({"const", "default", "examples"})
"""Keywords of JSON Schema whose values are not schemas."""

# An escape, a character class or a quoted string is one token; an unterminated one extends to the end of the
# text, so that no character is scanned twice.
_REGEX: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|\{(\d*+),?(\d*+)\}|[|()]", re.DOTALL)
_GRAMMAR: Final = re.compile(
    r'"(?:\\.|[^"\\])*"?|\\.|\[(?:\\.|[^\]\\])*\]?|\{(\d*+),?(\d*+)\}|~\s*(\d+)(?:\.\.(\d+))?|[|()]',
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarBounds:
    """The limits of one grammar; ``max_alternatives`` is that of one list, or of one pattern as a whole."""

    max_bytes: int
    max_repeats: int
    max_alternatives: int
    max_nesting: int

    def check(self, kind: str, text: str) -> None:
        """Raise ApiError ``invalid_value`` for a grammar that exceeds a bound.

        ``kind`` is a field of vLLM's; the text of ``json``, ``choice`` and ``structural_tag`` is JSON.
        """
        # A character has at least one byte: a text that is far too long need not be encoded.
        num_bytes = len(text) if len(text) > self.max_bytes else len(text.encode("utf-8", "surrogatepass"))
        self._check_limit(kind, "bytes of text", num_bytes, self.max_bytes, "max_grammar_bytes")
        if kind in {"regex", "grammar"}:
            self._check_pattern(kind, text, _REGEX if kind == "regex" else _GRAMMAR)
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return  # the compiler reports the syntax error
        if kind == "choice" and isinstance(value, list):
            self._check_limit(
                kind, "alternatives", len(value), self.max_alternatives, "max_grammar_alternatives"
            )
            return
        for depth, key, part in _parts(value):
            if isinstance(part, dict | list):
                self._check_limit(kind, "levels of nesting", depth, self.max_nesting, "max_grammar_nesting")
            if key in _LISTS and isinstance(part, list):
                self._check_limit(
                    kind, "alternatives", len(part), self.max_alternatives, "max_grammar_alternatives"
                )
            elif key == "patternProperties" and isinstance(part, dict):
                for pattern in part:
                    self._check_pattern(kind, pattern, _REGEX)
            elif key in _PATTERNS and isinstance(part, str):
                self._check_pattern(kind, part, _GRAMMAR if key in {"ebnf", "grammar"} else _REGEX)

    def _check_pattern(self, kind: str, text: str, tokens: re.Pattern[str]) -> None:
        depth = num_alternatives = 1
        for token in tokens.finditer(text):
            if token[0] == "|":
                num_alternatives += 1
            elif token[0] in {"(", ")"}:
                depth += 1 if token[0] == "(" else -1
                self._check_limit(kind, "levels of nesting", depth, self.max_nesting, "max_grammar_nesting")
            else:
                for count in filter(None, token.groups()):
                    # Python itself refuses integers of thousands of digits.
                    repeats = int(count) if len(count) < 10 else 10**9
                    self._check_limit(kind, "repetitions", repeats, self.max_repeats, "max_grammar_repeats")
        self._check_limit(
            kind, "alternatives", num_alternatives, self.max_alternatives, "max_grammar_alternatives"
        )

    def _check_limit(self, kind: str, what: str, got: int, most: int, setting: str) -> None:
        if got > most:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A grammar may have {most} {what} ({setting}), this {kind} has {got} or more; make it "
                "simpler, or check the answer afterwards.",
                FIELD,
            )


def _parts(value: Any) -> Iterator[tuple[int, str, Any]]:
    left: list[tuple[int, str, Any]] = [(1, "", value)]
    while left:
        depth, key, part = entry = left.pop()
        yield entry
        if isinstance(part, dict):
            left += [(depth + 1, name, one) for name, one in part.items() if name not in _VALUES]
        elif isinstance(part, list) and key != "enum":
            left += [(depth + 1, "", one) for one in part if isinstance(one, dict | list)]


__all__ = ["FIELD", "GrammarBounds"]
