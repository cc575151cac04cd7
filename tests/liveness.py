"""Whether others are served while one client sends something: `/health/live`, and a tenant's first tokens.

They ask from a process of their own, ``python -m``, since a process that sends a large request is busy.
"""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_NUM_SENT: Final = 3
_NUM_ALONE: Final = 8
_FACTOR: Final = 3.0
"""How many times as long as alone somebody may wait, where that is less than half of what is sent takes."""
_PAUSE_S: Final = 0.02

_Span = tuple[float, float]
"""When something began and ended, by the machine's monotonic clock."""


class Bystanders:
    """A client that asks for the server's health, and a tenant that waits for first tokens.

    Args:
        port: The server's.
        key: The tenant's; empty on a server without keys.
    """

    def __init__(self, port: int, key: str = "") -> None:
        """Ask the server at a port."""
        self._command = [sys.executable, "-m", __name__, str(port), key]

    def unharmed(self, *sends: Callable[[int], object]) -> None:
        """Assert that nobody waits for most of the time that something takes.

        A request that blocks a server keeps everybody waiting for as long as it does: it is sent three times,
        and the median is judged of the part of its time for which one of them waited. A busy machine slows
        all of them down alike.

        Args:
            sends: Each sends something; receives how often it was sent before.
        """
        with subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as asking:
            assert asking.stdin is not None
            assert asking.stdout is not None
            asking.stdout.readline()
            sent = [
                [_timed(functools.partial(send, number)) for number in range(_NUM_SENT)] for send in sends
            ]
            asking.stdin.close()
            waits, alone_s = json.loads(asking.stdout.readline())
        parts = [[_longest_part(one, waits, _FACTOR * alone_s) for one in spans] for spans in sent]
        took_s = [[round(end - began, 3) for began, end in spans] for spans in sent]
        assert all(statistics.median(some) < 0.5 for some in parts), (
            f"they waited for {parts} of {took_s} s, alone {alone_s:.3f} s"
        )


def _timed(act: Callable[[], object]) -> _Span:
    began = time.monotonic()
    act()
    return began, time.monotonic()


def _longest_part(sent: _Span, waits: list[_Span], usual_s: float) -> float:
    """Return for which part of a request's time somebody waited, of those who waited unusually long."""
    shared = [min(end, sent[1]) - max(began, sent[0]) for began, end in waits]
    return max((one for one in shared if one > usual_s), default=0.0) / (sent[1] - sent[0])


def _ask(port: int, method: str, path: str, body: Any = None, key: str = "") -> None:
    """Wait for an answer's first line, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.readline()
    connection.close()


def _main(port: int, key: str) -> None:
    """Announce that something may be sent; when standard input ends, print all waits, and the usual one."""
    body = {"prompt": "The Eiffel Tower is in", "max_tokens": 1, "stream": True}
    is_over = threading.Event()
    all_waits: list[list[_Span]] = []

    def ask_token() -> None:
        _ask(port, "POST", "/v1/completions", body, key)

    def ask_health() -> None:
        _ask(port, "GET", "/health/live")

    def ask_on(ask: Callable[[], None]) -> None:
        waits: list[_Span] = []
        all_waits.append(waits)
        while not is_over.wait(_PAUSE_S):
            began = time.monotonic()
            waits.append((began, math.inf))  # if it fails
            ask()
            waits[-1] = (began, time.monotonic())

    def alone_s() -> float:
        spans = [_timed(ask_token) for _ in range(_NUM_ALONE)]
        return statistics.median(end - began for began, end in spans)

    before_s = alone_s()
    print(flush=True)  # noqa: T201 - to the process that started this one
    asking = [threading.Thread(target=ask_on, args=(one,)) for one in (ask_health, ask_token)]
    for one in asking:
        one.start()
    sys.stdin.read()
    is_over.set()
    for one in asking:
        one.join()
    print(json.dumps([[*itertools.chain(*all_waits)], max(before_s, alone_s())]), flush=True)  # noqa: T201 - likewise


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
