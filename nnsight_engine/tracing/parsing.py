"""Parsing of Python by one thread at a time, without garbage collection.

CPython 3.11 keeps the depth of the tree in one place for all threads; parsing in between, also by a collected
object, makes its check fail with a ``SystemError``.
"""

from __future__ import annotations

import ast
import gc
import threading

_one_at_a_time = threading.RLock()


def parse(text: str, filename: str = "<unknown>") -> ast.Module:
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(text, filename)
        finally:
            if collects:
                gc.enable()
