"""Compilation of received source fragments, and the cache of the results.

Code is compiled with a ``SentFile`` as its file name: lines in errors and nested blocks are those of the
fragment itself, even if a file here or of another sender has the same name.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable
from types import CodeType
from typing import Final, Generic, TypeVar

from nnsight_engine.serialization.limits import Check
from nnsight_engine.serialization.source.fragments import SourceFragment, tree_of
from nnsight_engine.serialization.source.source_cache import SOURCE_CACHE
from nnsight_engine.tracing.sent_files import LinesFrom, SentFile

Compiler = Callable[[SourceFragment, tuple[str, ...], Check | None], CodeType]
Value = TypeVar("Value")
_LONGEST = 16 * 1024
_MAX_CHARACTERS = 2**18


class CodeCache(Generic[Value]):
    """An LRU cache of compiled code, keyed by all inputs of the compilation.

    Senders choose the entries, which outlive their requests: their number and size in characters are bounded.
    """

    def __init__(
        self, max_entries: int, *, longest: int = _LONGEST, max_characters: int = _MAX_CHARACTERS
    ) -> None:
        """Create an empty cache; an entry of more than ``longest`` characters is not cached."""
        self._max_entries, self._max_characters, self._longest = max_entries, max_characters, longest
        self._entries: collections.OrderedDict[Hashable, tuple[int, Value]] = collections.OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, num_characters: int, make: Callable[[], Value]) -> Value:
        if num_characters > self._longest:
            return make()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[1]
        made = make()
        with self._lock:
            before = self._entries.pop(key, None)  # another thread may have inserted it meanwhile
            self._entries[key] = (num_characters, made)
            self._num_characters += num_characters - (before[0] if before is not None else 0)
            while len(self._entries) > self._max_entries or self._num_characters > self._max_characters:
                _, (length, _) = self._entries.popitem(last=False)
                self._num_characters -= length
        return made


_CACHE: Final[CodeCache[CodeType]] = CodeCache(512)


def compile_received(
    compiler: Compiler, fragment: SourceFragment, variables: tuple[str, ...], check: Check | None
) -> CodeType:
    """Compile a fragment with a function of ``fragments``, or return the cached code."""
    code = _CACHE.get(
        (compiler, fragment, variables, check),
        fragment.num_characters + sum(map(len, variables)),
        lambda: compiler(_named(fragment), variables, check),
    )
    show(fragment)
    return code


def show(fragment: SourceFragment) -> None:
    SOURCE_CACHE.put(fragment.filename, fragment.line, fragment.text)


def _named(fragment: SourceFragment) -> SourceFragment:
    lines = LinesFrom(fragment.line, fragment.text)
    file = SentFile(fragment.filename, lines, functools.partial(tree_of, fragment))
    return dataclasses.replace(fragment, filename=file)
