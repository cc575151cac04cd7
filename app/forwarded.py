"""Translates ``Forwarded`` (RFC 7239) to the ``X-Forwarded`` headers of uvicorn, which decides about trust.

A proxy sets one kind of header and passes the other on unchanged, as forged by a client: only the kind that
the operator configured is read.
"""

from __future__ import annotations

import re
from typing import Final

_FOR: Final = b"x-forwarded-for"
_PROTO: Final = b"x-forwarded-proto"
_NAME: Final = b"forwarded"
_OTHERS: Final = frozenset({_FOR, _PROTO, _NAME})
_PAIR: Final = re.compile(r'\s*+(?:(\w+)=("(?:[^"\\]|\\.)*"|[^;,"\s]*))?\s*+(;|,|\Z)')
_SECURE: Final = {"http", "https"}

Headers = list[tuple[bytes, bytes]]


def as_x_forwarded(headers: Headers) -> Headers:
    """Return the translated headers; without a well-formed one the client is the peer of the connection."""
    text = ",".join(value.decode("latin-1") for name, value in headers if name == _NAME)
    others = [(name, value) for name, value in headers if name not in _OTHERS]
    hops = _hops(text)
    if not hops:
        return others
    addresses = ", ".join(_address(hop.get("for", "unknown")) for hop in hops)
    proto = hops[-1].get("proto", "").lower()
    forwarded = [(_FOR, addresses.encode("latin-1"))]
    return [*others, *forwarded, *([(_PROTO, proto.encode())] if proto in _SECURE else [])]


def _hops(text: str) -> list[dict[str, str]]:
    hops: list[dict[str, str]] = [{}]
    place = 0
    while place < len(text):
        found = _PAIR.match(text, place)
        if found is None:
            return []
        name, value, end = found.groups()
        if name:
            hops[-1][name.lower()] = re.sub(r"\\(.)", r"\1", value[1:-1]) if value[:1] == '"' else value
        if end == ",":
            hops.append({})
        place = found.end()
    return [hop for hop in hops if hop]


def _address(node: str) -> str:
    if node.startswith("["):
        return node[1:].partition("]")[0]
    return node.partition(":")[0] if node.count(":") == 1 else node


__all__ = ["as_x_forwarded"]
