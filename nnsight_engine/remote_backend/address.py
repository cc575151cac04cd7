"""A server's address as people write it. Loads no torch: commands at a terminal start with it."""

from __future__ import annotations

import httpx


def normalized(url: str) -> str:
    """Return a server's address without its trailing slash or ``/v1``; ``http`` is understood.

    Raises:
        ValueError: It is none.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise ValueError(f"a server's address is like http://127.0.0.1:8000, got {url!r}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"a server's address is like http://127.0.0.1:8000, got {url!r}")
    return full.rstrip("/").removesuffix("/v1")
