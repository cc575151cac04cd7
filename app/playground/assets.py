"""The built files of the playground, read once: the page and its assets.

Names of assets contain a hash of their content, so browsers may cache them indefinitely; the page itself,
which refers to them, is revalidated each time. ``routes/playground.py`` serves both.
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
    """Return the scripts and stylesheets of the page, by name."""
    return {path.name: _read(path) for path in sorted((STATIC / "assets").iterdir())}


def _read(path: Path) -> Asset:
    return asset(path.read_bytes(), path.name)


__all__ = ["PAGE", "STATIC", "assets", "page"]
