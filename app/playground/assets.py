"""The built files of the playground: assets have a hash in their names, so only the page is revalidated."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from app.pages import Asset, asset

STATIC: Final = Path(__file__).resolve().parent / "static"
PAGE: Final = "index.html"


@functools.cache
def page() -> Asset:
    return _read(STATIC / PAGE)


@functools.cache
def assets() -> dict[str, Asset]:
    return {path.name: _read(path) for path in sorted((STATIC / "assets").iterdir())}


def _read(path: Path) -> Asset:
    return asset(path.read_bytes(), path.name)


__all__ = ["PAGE", "STATIC", "assets", "page"]
