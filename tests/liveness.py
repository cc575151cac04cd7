"""Whether others notice what one client sends: `/health/live` and another tenant's first tokens, meanwhile.

They ask from a process of their own, ``python -m``, since a process that sends a large request is busy.
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
_PAUSE_S: Final = 0.02
_BURST_S: Final = 0.005
"""Of computing, from which is seen how busy the processors are."""


class Bystanders:
    """A client that asks for the server's health, and a tenant that waits for first tokens.

    Args:
        port: The server's.
        key: The tenant's; empty on a server without keys.
    """

    def __init__(self, port: int, key: str = "") -> None:
        """Ask the server at a port."""
        self._command = [sys.executable, "-m", __name__, str(port), key]

    def unharmed(self, send: Callable[[int], None]) -> None:
        """Assert that they are served as usual while something is sent.

        A request that blocks a server does so each time, unlike other programs of the machine: it is sent up
        to four times, and one try without harm suffices. The baseline is measured before and after, and the
        time for which a processor was awaited is subtracted, so that the verdict holds on a busy machine too.

        Args:
            send: Sends it; receives the number of the try.
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
                health_s, token_s, alone_s, slower, stall_s = json.loads(asking.stdout.readline())
            measured = (
                f"health {health_s:.2f} s, first token {token_s:.2f} s, alone {alone_s:.2f} s, the machine "
                f"{slower:.1f} times as slow, and for {stall_s:.2f} s at once"
            )
            is_alive = health_s < MAX_HEALTH_S + stall_s
            if is_alive and token_s < FIRST_TOKEN_FACTOR * alone_s * slower + _GRACE_S:
                return
        raise AssertionError(measured)


class _Processors:
    """How long computing takes on this machine, for how long it computes.

    Attributes:
        stall_s: The longest that a processor was waited for.
    """

    def __init__(self) -> None:
        self.stall_s = 0.0
        self._computed_s = self._passed_s = 0.0

    def look(self) -> None:
        """Compute a little."""
        began, before_s = time.monotonic(), time.thread_time()
        computed_s = 0.0
        while computed_s < _BURST_S:
            computed_s = time.thread_time() - before_s
        passed_s = time.monotonic() - began
        self._computed_s += computed_s
        self._passed_s += passed_s
        self.stall_s = max(self.stall_s, passed_s - computed_s)

    def look_until(self, over: threading.Event) -> None:
        """Look again and again."""
        while not over.wait(_PAUSE_S):
            self.look()

    @property
    def slowness(self) -> float:
        """How many times as long as it computes something takes."""
        return self._passed_s / self._computed_s


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


def _alone(port: int, key: str, processors: _Processors) -> float:
    """Return how long a first token takes while nothing is sent."""
    for _ in range(_NUM_ALONE):
        processors.look()
    return statistics.median(_first_token(port, key) for _ in range(_NUM_ALONE))


def _main(port: int, key: str) -> None:
    """Announce that something may be sent; when standard input ends, what was slowest, and what is usual."""
    over = threading.Event()
    usually, meanwhile = _Processors(), _Processors()
    health: list[float] = []
    tokens: list[float] = []

    def ask_health() -> None:
        while not over.is_set():
            health.append(_asked(port, "GET", "/health/live"))
            time.sleep(_PAUSE_S)

    def ask_tokens() -> None:
        # None that is asked for afterwards, or one that was held up for long would be one among fast ones.
        while not (over.is_set() and tokens):
            tokens.append(_first_token(port, key))

    alone_s = _alone(port, key, usually)
    meanwhile.look()
    print(flush=True)  # noqa: T201 - to the process that started this one
    asking = [threading.Thread(target=one) for one in (ask_health, ask_tokens)]
    asking.append(threading.Thread(target=meanwhile.look_until, args=(over,)))
    for one in asking:
        one.start()
    sys.stdin.read()
    over.set()
    for one in asking:
        one.join()
    alone_s = max(alone_s, _alone(port, key, usually))
    slower = max(1.0, meanwhile.slowness / usually.slowness)
    measured = [max(health), statistics.median(tokens), alone_s, slower, meanwhile.stall_s]
    print(json.dumps(measured), flush=True)  # noqa: T201 - likewise


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
