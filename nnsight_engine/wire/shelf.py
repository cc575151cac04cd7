"""Source that came from elsewhere, where Python's own tools look for it.

Tracebacks, debuggers and ``inspect`` read a file's lines through ``linecache``. Pieces of files that do not
exist here are put there under their names, at their lines, with nothing in between. A file that is here is
left alone, and so are entries that others made; old ones of ours make room for new ones.
"""

from __future__ import annotations

import collections
import linecache
import os
import threading

_MAX_FILES = 256


class Shelf:
    """Pieces of files by name, for as many files as there is room for."""

    def __init__(self, *, max_files: int = _MAX_FILES) -> None:
        """Start empty."""
        self._max_files = max_files
        self._files: collections.OrderedDict[str, list[str]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def put(self, filename: str, line: int, text: str) -> None:
        """Show ``text`` at ``line`` of a file that is not here."""
        with self._lock:
            held = self._files.get(filename)
            entry = linecache.cache.get(filename)
            ours = entry is not None and len(entry) > 2 and entry[2] is held
            if not ours and (entry is not None or os.path.lexists(filename)):
                return
            lines = held if held is not None and ours else []
            _place(lines, line, text)
            self._files[filename] = lines
            self._files.move_to_end(filename)
            linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
            if len(self._files) > self._max_files:
                oldest, _ = self._files.popitem(last=False)
                linecache.cache.pop(oldest, None)


def _place(lines: list[str], line: int, text: str) -> None:
    new = [f"{one}\n" for one in text.removesuffix("\n").split("\n")]
    lines.extend("\n" for _ in range(line - 1 + len(new) - len(lines)))
    lines[line - 1 : line - 1 + len(new)] = new
    if new[0][:1] in {" ", "\t"} and line > 1 and not lines[line - 2].strip():
        lines[line - 2] = "if 1:\n"  # so that the whole parses, for traces within sent functions


SHELF = Shelf()
"""The process's, as ``linecache`` is."""
