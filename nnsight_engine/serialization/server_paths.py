"""Removal of installation paths from texts that leave a server: clients do not see its file system."""

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


def without_server_paths(text: str) -> str:
    """Return the text with files of Python and packages named like ``torch/functional.py``."""
    return _installed().sub("", text) if "/" in text else text


__all__ = ["without_server_paths"]
