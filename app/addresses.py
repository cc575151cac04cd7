from __future__ import annotations

import ipaddress
from typing import Final


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_RULE: Final = "trusted_proxies lists addresses and networks, such as 10.1.2.3 or 10.0.0.0/8"


def check_proxies(listed: str) -> None:
    """Raise ValueError, with a suggested correction, for a part that is neither an address nor a network."""
    for one in filter(None, (part.strip() for part in listed.split(","))):
        try:
            ipaddress.ip_network(one)
        except ValueError as error:
            raise ValueError(f"{_RULE}, got {one!r}; {_step(one)}") from error


def _step(one: str) -> str:
    if one == "*":
        return "every client could then forge its address: list the network of your proxies"
    try:
        within = ipaddress.ip_interface(one)
    except ValueError:
        return "write the proxy's address"
    return f"write {within.network} for the network, or {within.ip} for the one address"
