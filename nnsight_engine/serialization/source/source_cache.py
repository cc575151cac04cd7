"""Registration of received source in ``linecache``, where tracebacks, debuggers and ``inspect`` look for it.

Existing files and entries created by other code are left alone. Several senders may use the same file name,
so nothing that is sent back to a sender is read from here.
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
"""Cost that is counted for each line in addition to its characters."""


class SourceCache:
    def __init__(self, *, max_files: int = _MAX_FILES, max_characters: int = _MAX_CHARACTERS) -> None:
        self._max_files, self._max_characters = max_files, max_characters
        self._files: collections.OrderedDict[str, _Pieces] = collections.OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def put(self, filename: str, line: int, text: str, *, is_quoted: bool = False) -> None:
        """Register a text of a file that does not exist here; one quoted in errors never mixes with code."""
        with self._lock:
            entry = linecache.cache.get(filename)
            shown: object = entry[2] if entry is not None and len(entry) > 2 else None
            held = self._files.get(filename)
            is_known = shown is not None and shown is held
            if is_known and held is not None and held.is_quoted != is_quoted:
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
            self._num_characters += pieces.place(line, text)
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
        self._last = 0

    def place(self, line: int, text: str) -> int:
        before = self.num_characters
        new = [f"{one}\n" for one in text.removesuffix("\n").split("\n")]
        for number, one in enumerate(new, start=line):
            self._set(number, one)
        self._last = max(self._last, line - 1 + len(new))
        if new[0][:1] in {" ", "\t"} and line > 1 and not self[line - 2].strip():
            self._set(line - 1, "if 1:\n")  # so that tools that parse the whole file can do so
        return self.num_characters - before

    def _set(self, number: int, line: str) -> None:
        held = self._lines.get(number)
        self.num_characters += len(line) + _OF_A_LINE if held is None else len(line) - len(held)
        self._lines[number] = line

    def __len__(self) -> int:
        return self._last

    def at(self, index: int) -> str:
        return self._lines.get(index + 1, "\n")


SOURCE_CACHE = SourceCache()
"""The instance of this process; ``linecache`` is per process as well."""
