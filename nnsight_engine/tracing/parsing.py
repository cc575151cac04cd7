"""Thread-safe parsing of Python.

CPython 3.11 keeps the depth of the tree it is building in one place for all threads, and checks it at the
end. A garbage collection in between can run code that parses, or let another thread do so, and then the
check fails with a ``SystemError``. So one thread parses at a time, with garbage collection disabled.
"""

from __future__ import annotations

import ast
import gc
import threading

_one_at_a_time = threading.RLock()


def parse(text: str, filename: str = "<unknown>") -> ast.Module:
    """Parse as ``ast.parse`` does.

    Raises:
        SyntaxError: The text is not Python.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(text, filename)
        finally:
            if collects:
                gc.enable()
