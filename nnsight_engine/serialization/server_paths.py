"""Paths of a server's own files, as its clients read them: where things are installed is nobody's business.

A traceback or a text that leaves names a file of Python's or of a package from there on,
``torch/functional.py``, as it is called wherever it is installed. Files that lie elsewhere are of whoever's
code runs, and keep their names.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

_FOLDERS: Final = ("stdlib", "platstdlib", "purelib", "platlib", "scripts", "data")
_PACKAGES: Final = Path(__file__).parents[2]


@cache
def _installed() -> re.Pattern[str]:
    """Return what matches the folders in which Python and packages are installed, the deepest first."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in _FOLDERS}
    folders |= {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {os.path.dirname(sys.executable), os.path.dirname(os.path.realpath(sys.executable))}
    folders |= {os.path.realpath(folder) for folder in folders}
    found = sorted((folder for folder in folders if len(folder) > 1), key=len, reverse=True)
    own = rf"{re.escape(str(_PACKAGES))}/(?=(?:nnsight_engine|app|api_schemas)/)"
    others = f"(?:{'|'.join(map(re.escape, found))})/(?:lib/python[\\d.]+/)?(?:site-packages/)?"
    return re.compile(rf"(?<![\w.-])(?:{others}|{own})")


def without_places(text: str) -> str:
    """Return a text in which files of Python and of packages are named from there on."""
    return _installed().sub("", text) if "/" in text else text


__all__ = ["without_places"]
