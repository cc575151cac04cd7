"""The built page, read once: what a browser asks for by name, and nothing else.

Names of assets carry a hash of their content, so a browser may keep them for ever; the page itself, which
names them, is asked for anew each time. ``routes/playground.py`` serves both.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).resolve().parent / "static"
PAGE: Final = "index.html"

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    """One file.

    Attributes:
        content: Its bytes.
        media_type: What they are.
        etag: A hash of them, quoted as HTTP has it.
    """

    content: bytes
    media_type: str
    etag: str


@functools.cache
def page() -> Asset:
    """Return the page."""
    return _read(STATIC / PAGE)


@functools.cache
def assets() -> dict[str, Asset]:
    """Return what the page loads, by name."""
    return {path.name: _read(path) for path in sorted((STATIC / "assets").iterdir())}


def _read(path: Path) -> Asset:
    content = path.read_bytes()
    return Asset(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


__all__ = ["PAGE", "STATIC", "Asset", "assets", "page"]
