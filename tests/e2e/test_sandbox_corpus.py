"""Every attempt of the security corpus, sent to a real server by a sandboxed key while others generate."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.e2e.keyed import KeyedServer
from tests.e2e.test_sandbox import BLOCKS, Sandboxed
from tests.security.attempts import Attempt, every_attempt

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_AT_ONCE = 6


class Target:
    def __init__(self, server: Sandboxed, listener: socket.socket, secret: str) -> None:
        self.server, self.secret = server, secret
        self._listener = listener
        self._text = server.canary.read_text()
        self._begin = (
            f"x = torch.arange(12.0).reshape(3, 4)\ncanary = {str(server.canary)!r}\n"
            f"port = {listener.getsockname()[1]}\n"
        )
        self._end = "\nreport = save(str(got))"

    def attempt(self, attempt: Attempt) -> str:
        """Return why an attempt is not held off; nothing if it is."""
        answer = self.server.complete(self._begin + attempt.code + self._end)
        if answer.status_code >= 500:
            return f"{attempt.name}: {answer.status_code} {answer.text}"
        if self.secret in answer.text or self._text in answer.text:
            return f"{attempt.name} was told a secret"
        return ""

    def assert_untouched(self) -> None:
        assert self.server.canary.read_text() == self._text
        assert sorted(self.server.canary.parent.iterdir()) == [self.server.canary]
        with pytest.raises(BlockingIOError):
            self._listener.accept()

    def tokens(self) -> str:
        answer = self.server.complete(None, max_tokens=8)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


@contextmanager
def target(server: Sandboxed, secret: str) -> Iterator[Target]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Target(server, listener, secret)


def test_the_whole_corpus_gets_nowhere_and_nobody_notices(keyed_server: KeyedServer) -> None:
    with target(Sandboxed(keyed_server), keyed_server.secret) as here:
        expected, found = here.tokens(), set[str]()
        is_over = threading.Event()

        def beside() -> None:
            while not is_over.is_set():
                found.add(here.tokens())

        neighbour = threading.Thread(target=beside)
        neighbour.start()
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                escaped = [why for why in pool.map(here.attempt, every_attempt()) if why]
        finally:
            is_over.set()
            neighbour.join()
        assert escaped == []
        assert found == {expected}
        here.assert_untouched()
        assert here.server.saves(BLOCKS["read"]) == here.server.saves(BLOCKS["read"], here.server.trusted)
