"""Whether others notice what one client sends: `/health/live` and another tenant's first tokens, meanwhile.

They ask from a process of their own, ``python -m``, since whoever sends a large request is busy with that.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

MAX_HEALTH_S: Final = 0.5
FIRST_TOKEN_FACTOR: Final = 2.0
_GRACE_S: Final = 0.5
"""Of a first token, for what a busy machine of two cores does by itself."""
_NUM_ALONE: Final = 8
_NUM_TRIES: Final = 4
_NUM_TOKENS: Final = 3
_PAUSE_S: Final = 0.02


class Bystanders:
    """Somebody who asks for the server's health, and a tenant who waits for first tokens.

    Args:
        port: The server's.
        key: The tenant's; empty on a server without keys.
    """

    def __init__(self, port: int, key: str = "") -> None:
        """Know whom to ask."""
        self._command = [sys.executable, "-m", __name__, str(port), key]

    def unharmed(self, send: Callable[[int], None]) -> None:
        """Assert that they are served as ever while something is sent.

        What a request does to a server it does each time, and other programs of the machine do not: it is
        sent up to four times, and has harmed nobody if once nobody was. What is usual is measured before and
        after, since others may have begun to compute meanwhile.

        Args:
            send: Gets the number of the try.
        """
        for number in range(_NUM_TRIES):
            with subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as asking:
                assert asking.stdin is not None
                assert asking.stdout is not None
                asking.stdout.readline()
                send(number)
                asking.stdin.close()
                health_s, token_s, alone_s = json.loads(asking.stdout.readline())
            told = f"health {health_s:.2f} s, first token {token_s:.2f} s, alone {alone_s:.2f} s"
            if health_s < MAX_HEALTH_S and token_s < FIRST_TOKEN_FACTOR * alone_s + _GRACE_S:
                return
        raise AssertionError(told)


def _asked(port: int, method: str, path: str, body: Any = None, key: str = "") -> float:
    """Return how long an answer's first line takes, on a connection of its own."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    response.readline()
    taken = time.monotonic() - start
    response.read()
    connection.close()
    return taken if response.status == 200 else float("inf")


def _first_token(port: int, key: str) -> float:
    body = {"prompt": "The Eiffel Tower is in", "max_tokens": 1, "stream": True}
    return _asked(port, "POST", "/v1/completions", body, key)


def _main(port: int, key: str) -> None:
    """Tell that something may be sent; when standard input ends, what was slowest, and what is usual."""
    over = threading.Event()
    health: list[float] = []
    tokens: list[float] = []

    def ask_health() -> None:
        while not over.is_set():
            health.append(_asked(port, "GET", "/health/live"))
            time.sleep(_PAUSE_S)

    def ask_tokens() -> None:
        while not over.is_set() or len(tokens) < _NUM_TOKENS:
            tokens.append(_first_token(port, key))

    def alone() -> float:
        return statistics.median(_first_token(port, key) for _ in range(_NUM_ALONE))

    alone_s = alone()
    print(flush=True)  # noqa: T201 - to the process that started this one
    asking = [threading.Thread(target=one) for one in (ask_health, ask_tokens)]
    for one in asking:
        one.start()
    sys.stdin.read()
    over.set()
    for one in asking:
        one.join()
    told = [max(health), statistics.median(tokens), max(alone_s, alone())]
    print(json.dumps(told), flush=True)  # noqa: T201 - likewise


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
