"""Addresses of servers; without an import of torch, because terminal commands import it at startup."""

from __future__ import annotations

import ipaddress

import httpx


def normalized(url: str) -> str:
    """Return an address without trailing slash or ``/v1``, ``http`` by default, or raise ``ValueError``."""
    full = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise ValueError(f"a server's address is like http://127.0.0.1:8000, got {url!r}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"a server's address is like http://127.0.0.1:8000, got {url!r}")
    return full.rstrip("/").removesuffix("/v1")


def is_local_server(address: str) -> bool:
    """Return whether a server is on this machine, so that compression is of no use."""
    host = httpx.URL(address).host if "://" in address else ""
    try:
        return not host or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
