"""Addresses of servers, and when a request to one is repeated, on threads and in an event loop.

Nothing here imports torch, because terminal commands import it at startup. A server that was never reached,
or responds that it is not ready, has not processed the request: these are always retried. If the connection
broke during a request, only repeatable requests are retried.
"""

from __future__ import annotations

import ipaddress
import random
import time
from collections.abc import Iterator
from typing import Final

import httpx

from nnsight_engine.core.config import CONFIG
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError


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


_CONTACT_S: Final = 3.0
"""How long to keep trying to reach a server that has not responded yet."""
_PATIENCE_S: Final = 120.0
"""How long to wait for a server that has responded before: it may be starting, or restarting."""
_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 5.0
_RETRIED_CODES: Final = frozenset({"queue_full", "starting", "draining", "engine_restarting"})
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors after which the server is certain not to have seen the request."""


class Retry:
    """Retry state of one operation, which may be executed twice if it ``is_repeatable``."""

    def __init__(self, url: str, *, is_repeatable: bool = True) -> None:
        """``_contact`` are the pauses while it is not reached, ``_ready`` those while it is not ready."""
        self._url = url
        self._is_repeatable = is_repeatable
        self._contact = _growing_pauses(_CONTACT_S)
        self._ready: Iterator[float] | None = None

    def progressed(self) -> None:
        """Reset the pauses after progress; the server is now known to respond."""
        self._contact = _growing_pauses(_PATIENCE_S)
        self._ready = None

    def wait(self, error: httpx.TransportError | RemoteError) -> None:
        """Sleep before the next attempt; raises like ``pause_s``."""
        time.sleep(self.pause_s(error))

    def pause_s(self, error: httpx.TransportError | RemoteError) -> float:
        """Return the pause before the next attempt, in seconds, or raise the last one's ``RemoteError``."""
        if isinstance(error, httpx.TransportError):
            may_go_on = self._is_repeatable or isinstance(error, _UNSENT)
            pause = next(self._contact, None) if may_go_on else None
            if pause is None:
                raise _unreachable(self._url, error) from error
            return pause
        if isinstance(error, RemoteConnectionError):
            pause = next(self._contact, None)
            if pause is None:
                raise error
            return pause
        if error.code not in _RETRIED_CODES:
            raise error
        self._ready = self._ready or _growing_pauses(_PATIENCE_S)
        pause = next(self._ready, None)
        if pause is None:
            raise error
        return max(pause, min(error.retry_after_s, _MAX_PAUSE_S))


def _unreachable(url: str, error: httpx.TransportError) -> RemoteConnectionError:
    without_frames(error)
    return RemoteConnectionError(
        f"{url} cannot be reached, or broke off: {str(error) or type(error).__name__}. Is the server "
        "running, and is this its address? `remote=` and CONFIG.API.HOST say where it is."
    )


def without_frames(error: httpx.TransportError) -> None:
    """Remove from the cause of an error the two dozen frames of the HTTP client, and what they translated."""
    if not CONFIG.APP.DEBUG:
        error.__traceback__ = error.__cause__ = error.__context__ = None


def _growing_pauses(patience_s: float) -> Iterator[float]:
    """Yield pauses in seconds, doubled each time and varied, for ``patience_s`` seconds."""
    end = time.monotonic() + patience_s
    pause = _FIRST_PAUSE_S
    while time.monotonic() < end:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, so that clients do not retry at once
        pause = min(2 * pause, _MAX_PAUSE_S)
