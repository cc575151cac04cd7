"""The header ``Forwarded`` of RFC 7239, said as the older ``X-Forwarded-For`` and ``-Proto``, for uvicorn.

A proxy writes one of the two kinds and passes the other on as a client made it up, so a server reads only the
one that its operator has chosen. Whose headers count is uvicorn's to decide.
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
    """Return a request's headers with what ``Forwarded`` says of each hop in place of the older ones.

    A header that cannot be read says nothing, so that the client is the connection's other side.
    """
    text = ",".join(value.decode("latin-1") for name, value in headers if name == _NAME)
    others = [(name, value) for name, value in headers if name not in _OTHERS]
    hops = _hops(text)
    if not hops:
        return others
    addresses = ", ".join(_address(hop.get("for", "unknown")) for hop in hops)
    proto = hops[-1].get("proto", "").lower()
    said = [(_FOR, addresses.encode("latin-1"))]
    return [*others, *said, *([(_PROTO, proto.encode())] if proto in _SECURE else [])]


def _hops(text: str) -> list[dict[str, str]]:
    """Return what each hop says, by name; none where the text is no such header."""
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
    """Return a node's address without its port."""
    if node.startswith("["):
        return node[1:].partition("]")[0]
    return node.partition(":")[0] if node.count(":") == 1 else node


__all__ = ["as_x_forwarded"]
