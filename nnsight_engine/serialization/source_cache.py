"""Source that came from elsewhere, where Python's own tools look for it.

Tracebacks, debuggers and ``inspect`` read a file's lines through ``linecache``. Pieces of files that do not
exist here are put there under their names, at their lines, with nothing in between. A file that is here is
left alone, and so are entries that others made; old ones of ours make room for new ones. It is a help for
people, by names that several senders may have given: nothing that is told to a sender is read from here.
"""

from __future__ import annotations

import collections
import linecache
import os
import threading

from nnsight_engine.tracing.sent_files import Lines

_MAX_FILES = 256
_MAX_CHARACTERS = 2**23
_OF_A_LINE = 128
"""What a line costs beside its characters."""


class SourceCache:
    """Pieces of files by name, for as many files and characters as there is room for."""

    def __init__(self, *, max_files: int = _MAX_FILES, max_characters: int = _MAX_CHARACTERS) -> None:
        """Start empty."""
        self._max_files, self._max_characters = max_files, max_characters
        self._files: collections.OrderedDict[str, _Pieces] = collections.OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def put(self, filename: str, line: int, text: str) -> None:
        """Show ``text`` at ``line`` of a file that is not here."""
        with self._lock:
            entry = linecache.cache.get(filename)
            shown: object = entry[2] if entry is not None and len(entry) > 2 else None
            if shown is None or shown is not self._files.get(filename):
                if entry is not None or os.path.lexists(filename):
                    return
                self._drop(filename)
                self._files[filename] = _Pieces(len(filename))
                self._num_characters += len(filename)
            pieces = self._files[filename]
            self._num_characters += pieces.place(line, text)
            self._files.move_to_end(filename)
            linecache.cache[filename] = (pieces.num_characters, None, pieces, filename)  # type: ignore[assignment] # a list is wanted, and read like any sequence
            while len(self._files) > self._max_files or self._num_characters > self._max_characters:
                oldest = next(iter(self._files))
                self._drop(oldest)
                linecache.cache.pop(oldest, None)

    def _drop(self, filename: str) -> None:
        dropped = self._files.pop(filename, None)
        if dropped is not None:
            self._num_characters -= dropped.num_characters


class _Pieces(Lines):
    """Lines of one file; those that did not come are empty, and take no room."""

    def __init__(self, num_characters: int) -> None:
        self.num_characters = num_characters
        self._lines: dict[int, str] = {}
        self._last = 0

    def place(self, line: int, text: str) -> int:
        """Put a text at its line; returns how many characters more there are."""
        before = self.num_characters
        new = [f"{one}\n" for one in text.removesuffix("\n").split("\n")]
        for number, one in enumerate(new, start=line):
            self._set(number, one)
        self._last = max(self._last, line - 1 + len(new))
        if new[0][:1] in {" ", "\t"} and line > 1 and not self[line - 2].strip():
            self._set(line - 1, "if 1:\n")  # so that the whole parses, for who reads it so
        return self.num_characters - before

    def _set(self, number: int, line: str) -> None:
        held = self._lines.get(number)
        self.num_characters += len(line) + _OF_A_LINE if held is None else len(line) - len(held)
        self._lines[number] = line

    def __len__(self) -> int:
        return self._last

    def at(self, index: int) -> str:
        return self._lines.get(index + 1, "\n")


SHELF = SourceCache()
"""The process's, as ``linecache`` is."""
