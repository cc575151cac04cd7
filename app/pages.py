"""Serves pages with a strict policy: they may use this server's own scripts and this server, nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Final

from starlette.responses import Response

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}

_DIRECTIVES: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REVALIDATE: Final = "no-cache"
"""Cache-Control for files whose name stays the same when their content changes."""
IMMUTABLE: Final = "public, max-age=31536000, immutable"
"""Cache-Control for files whose name contains a hash of their content."""
_NOT_MODIFIED: Final = 304


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def asset(content: bytes, name: str) -> Asset:
    kind = _TYPES[name.rpartition(".")[2]]
    return Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def answer(found: Asset, cache: str, held: str, **directives: str) -> Response:
    """Return a file, or 304 if it is ``held`` already; ``directives`` replace those of the policy."""
    own = {name.replace("_", "-"): value for name, value in directives.items()}
    policy = "; ".join(f"{name} {value}" for name, value in {**_DIRECTIVES, **own}.items())
    headers = {**_HEADERS, "Content-Security-Policy": policy, "Cache-Control": cache, "ETag": found.etag}
    if found.etag in held:
        return Response(status_code=_NOT_MODIFIED, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


__all__ = ["IMMUTABLE", "REVALIDATE", "Asset", "answer", "asset"]
