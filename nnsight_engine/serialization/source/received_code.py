"""Compilation of received source fragments, and the cache of the results.

Code is compiled with a ``SentFile`` as its file name: lines in errors and nested blocks are those of the
fragment itself, even if a file here or of another sender has the same name.

The text is registered in ``linecache``, where tracebacks, debuggers and ``inspect`` look for it. Existing
files and entries created by other code are left alone. Several senders may use the same file name, so nothing
that is sent back to a sender is read from there.
"""

from __future__ import annotations

import collections
import functools
import linecache
import os
import threading
from collections.abc import Callable, Hashable
from types import CodeType
from typing import Final, Generic, TypeVar

from nnsight_engine.serialization.limits import Check
from nnsight_engine.serialization.source.fragments import SourceFragment, tree_of
from nnsight_engine.tracing.loaded_code import Lines, LinesFrom, SentFile

_MAX_FILES = 256
_MAX_SOURCE_CHARACTERS = 2**23
_OF_A_LINE = 128
"""Cost that is counted for each line in addition to its characters."""


class SourceCache:
    def __init__(self, *, max_files: int = _MAX_FILES, max_characters: int = _MAX_SOURCE_CHARACTERS) -> None:
        self._max_files, self._max_characters = max_files, max_characters
        self._files: collections.OrderedDict[str, _Pieces] = collections.OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def register(self, filename: str, line: int, text: str, *, is_quoted: bool = False) -> None:
        """Register a text of a file that does not exist here; one quoted in errors never mixes with code.

        A name that has a file, or an entry of other code, is left alone; over a limit the oldest are dropped.
        """
        with self._lock:
            entry = linecache.cache.get(filename)
            shown_lines: object = entry[2] if entry is not None and len(entry) > 2 else None
            known = self._files.get(filename)
            is_known = shown_lines is not None and shown_lines is known
            if is_known and known is not None and known.is_quoted != is_quoted:
                if is_quoted:
                    return
                self._drop(filename)
                del linecache.cache[filename]
                entry, is_known = None, False
            if not is_known:
                if entry is not None or os.path.lexists(filename):
                    return
                self._drop(filename)
                self._files[filename] = _Pieces(len(filename), is_quoted=is_quoted)
                self._num_characters += len(filename)
            pieces = self._files[filename]
            self._num_characters += pieces.insert(line, text)
            self._files.move_to_end(filename)
            linecache.cache[filename] = (pieces.num_characters, None, pieces, filename)  # type: ignore[assignment] # typed as a list, but only read as a sequence
            while len(self._files) > self._max_files or self._num_characters > self._max_characters:
                oldest = next(iter(self._files))
                self._drop(oldest)
                linecache.cache.pop(oldest, None)

    def _drop(self, filename: str) -> None:
        dropped = self._files.pop(filename, None)
        if dropped is not None:
            self._num_characters -= dropped.num_characters


class _Pieces(Lines):
    """Lines of one file; lines that were not received are empty and are not stored."""

    def __init__(self, num_characters: int, *, is_quoted: bool) -> None:
        self.num_characters = num_characters
        self.is_quoted = is_quoted
        self._lines: dict[int, str] = {}
        self._last_line = 0

    def insert(self, line: int, text: str) -> int:
        """Store a text whose first line has this number; return by how many characters the size grew."""
        num_before = self.num_characters
        lines = [f"{text_line}\n" for text_line in text.removesuffix("\n").split("\n")]
        for number, text_line in enumerate(lines, start=line):
            self._set(number, text_line)
        self._last_line = max(self._last_line, line - 1 + len(lines))
        if lines[0][:1] in {" ", "\t"} and line > 1 and not self[line - 2].strip():
            self._set(line - 1, "if 1:\n")  # so that tools that parse the whole file can do so
        return self.num_characters - num_before

    def _set(self, number: int, line: str) -> None:
        previous = self._lines.get(number)
        self.num_characters += len(line) + _OF_A_LINE if previous is None else len(line) - len(previous)
        self._lines[number] = line

    def __len__(self) -> int:
        return self._last_line

    def line_at(self, index: int) -> str:
        return self._lines.get(index + 1, "\n")


SOURCE_CACHE = SourceCache()
"""The instance of this process; ``linecache`` is per process as well."""


Compiler = Callable[[SourceFragment, tuple[str, ...], Check | None], CodeType]
Value = TypeVar("Value")
_LONGEST = 16 * 1024
_MAX_CHARACTERS = 2**18


class CodeCache(Generic[Value]):
    """An LRU cache of compiled or sent code, keyed by all inputs, or by the ``id`` of an object in the value.

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
        """Return the value of a key; it is made outside of the lock, so two threads may both make it."""
        if num_characters > self._longest:
            return make()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[1]
        value = make()
        with self._lock:
            replaced = self._entries.pop(key, None)  # another thread may have inserted it meanwhile
            self._entries[key] = (num_characters, value)
            self._num_characters += num_characters - (replaced[0] if replaced is not None else 0)
            while len(self._entries) > self._max_entries or self._num_characters > self._max_characters:
                _, (length, _) = self._entries.popitem(last=False)
                self._num_characters -= length
        return value


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
    SOURCE_CACHE.register(fragment.filename, fragment.line, fragment.text)


def _named(fragment: SourceFragment) -> SourceFragment:
    lines = LinesFrom(fragment.line, fragment.text)
    file = SentFile(fragment.filename, lines, functools.partial(tree_of, fragment))
    return fragment._replace(filename=file)
