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
    for proxy in filter(None, (part.strip() for part in listed.split(","))):
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ValueError(f"{_RULE}, got {proxy!r}; {_correction(proxy)}") from error


def _correction(proxy: str) -> str:
    if proxy == "*":
        return "every client could then forge its address: list the network of your proxies"
    try:
        within = ipaddress.ip_interface(proxy)
    except ValueError:
        return "write the proxy's address"
    return f"write {within.network} for the network, or {within.ip} for the one address"
