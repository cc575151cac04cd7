"""Pages that the server has for browsers, and what they load: from this server, and from nowhere else.

A page's policy lets it run its own script, speak to its own server, and nothing else. The playground and the
API's documentation are served so.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Final

from starlette.responses import Response

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
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
ASK_AGAIN: Final = "no-cache"
"""How a page is cached, whose name stays the same."""
FOR_EVER: Final = "public, max-age=31536000, immutable"
"""How something is cached whose name has a hash of its content."""
_NOT_MODIFIED: Final = 304


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


def asset(content: bytes, name: str) -> Asset:
    """Return a file of a name, whose ending says what it is."""
    kind = _TYPES[name.rpartition(".")[2]]
    return Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def answer(found: Asset, cache: str, held: str, **directives: str) -> Response:
    """Return a file as a response, or that the browser has it already.

    Args:
        found: The file.
        cache: How browsers keep it.
        held: The request's ``If-None-Match``.
        directives: What the policy has otherwise, with underscores for hyphens.
    """
    own = {name.replace("_", "-"): value for name, value in directives.items()}
    policy = "; ".join(f"{name} {value}" for name, value in {**_DIRECTIVES, **own}.items())
    headers = {**_HEADERS, "Content-Security-Policy": policy, "Cache-Control": cache, "ETag": found.etag}
    if found.etag in held:
        return Response(status_code=_NOT_MODIFIED, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


__all__ = ["ASK_AGAIN", "FOR_EVER", "Asset", "answer", "asset"]
