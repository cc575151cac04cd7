"""The built page, read once: what a browser asks for by name, and nothing else.

Names of assets carry a hash of their content, so a browser may keep them for ever; the page itself, which
names them, is asked for anew each time. ``routes/playground.py`` serves both.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from app.pages import Asset, asset

STATIC: Final = Path(__file__).resolve().parent / "static"
PAGE: Final = "index.html"


@functools.cache
def page() -> Asset:
    """Return the page."""
    return _read(STATIC / PAGE)


@functools.cache
def assets() -> dict[str, Asset]:
    """Return what the page loads, by name."""
    return {path.name: _read(path) for path in sorted((STATIC / "assets").iterdir())}


def _read(path: Path) -> Asset:
    return asset(path.read_bytes(), path.name)


__all__ = ["PAGE", "STATIC", "assets", "page"]
