"""How often something is asked of a server again, and after which pauses.

A server that was never reached has seen nothing, and one that says it is not ready has done nothing: both are
asked again, whatever it is about. Where the connection broke in between, only what may be done twice is. The
HTTP transport asks here, whether it waits on a thread or in an event loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Final

import httpx

from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError

_CONTACT_S: Final = 3.0
"""How long a server is tried to be reached that has not answered yet."""
_PATIENCE_S: Final = 120.0
"""How long one is waited for that has: it may be starting, or be started again."""
_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 5.0
_RETRIED_CODES: Final = frozenset({"queue_full", "starting", "draining", "engine_restarting"})
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Of these, the server has seen nothing."""


class Retry:
    """How often something is tried that failed.

    Args:
        url: The server's address.
        is_repeatable: Whether it may be done twice.
    """

    def __init__(self, url: str, *, is_repeatable: bool = True) -> None:
        """Begin with no failure."""
        self._url = url
        self._is_repeatable = is_repeatable
        self._contact = _growing_pauses(_CONTACT_S)
        self._ready: Iterator[float] | None = None

    def progressed(self) -> None:
        """Begin anew: the server is there, and has done something."""
        self._contact = _growing_pauses(_PATIENCE_S)
        self._ready = None

    def wait(self, error: httpx.TransportError | RemoteError) -> None:
        """Wait before the next try; raises what ``pause_s`` does."""
        time.sleep(self.pause_s(error))

    def pause_s(self, error: httpx.TransportError | RemoteError) -> float:
        """Return how long to wait before the next try.

        Raises:
            RemoteError: What went wrong, if there is to be none.
        """
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
    """Return what to say of a server that does not answer."""
    return RemoteConnectionError(
        f"{url} cannot be reached, or broke off: {str(error) or type(error).__name__}. Is the server "
        "running, and is this its address? `remote=` and CONFIG.API.HOST say where it is."
    )


def _growing_pauses(patience_s: float) -> Iterator[float]:
    """Yield how long to wait before each further try, for as long as the patience lasts."""
    end = time.monotonic() + patience_s
    pause = _FIRST_PAUSE_S
    while time.monotonic() < end:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311 - so that clients do not come together
        pause = min(2 * pause, _MAX_PAUSE_S)


__all__ = ["Retry"]
