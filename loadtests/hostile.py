"""The hostile tenant, in the phases that are theirs: what they do to the server.

Refusals are what a server should answer with, and no errors; what it must not is break.
"""

from __future__ import annotations

import http.client
from typing import Final
from urllib.parse import urlsplit

import gevent
from geventhttpclient.response import HTTPSocketResponse
from locust import task

from api_schemas.errors import ErrorCode
from loadtests.bodies import Operation
from loadtests.records import Told
from loadtests.users import COMPLETIONS, Asking, Client, LoadError, check_status, error_of, read_stream

_REFUSALS: Final = (range(400, 500), range(503, 504))
_TOO_LARGE: Final = 413
_PAUSE_S: Final = 0.2
_LINES_READ: Final = 5
_ENDED: Final = (ErrorCode.TRACE_FAILED, ErrorCode.TRACE_TIMED_OUT, ErrorCode.RATE_LIMITED)


class Hostile(Client):
    """Does nothing until its time comes."""

    abstract = True
    pauses_s = (0.0, 0.0)

    @task
    def attack(self) -> None:
        """Send a request, if it is time."""
        phase = self.environment.phase
        if phase is None or not phase.is_hostile:
            gevent.sleep(_PAUSE_S)
        else:
            self.ask()

    def send_operations(self, body: bytes, asking: Asking) -> None:
        """Send a completion, and read it to its end if it was not refused."""
        with self.request("POST", COMPLETIONS, body) as response:
            if is_refused(response):
                asking.outcome = Told.REFUSED
            else:
                read_stream(response, asking)

    def half_request(self, num_claimed: int) -> http.client.HTTPConnection:
        """Return a connection on which a request has begun that says it has so many bytes."""
        url = urlsplit(self.asked.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=60)
        connection.putrequest("POST", COMPLETIONS)
        for name, value in (*self.headers.items(), ("content-type", "application/json")):
            connection.putheader(name, value)
        connection.putheader("content-length", str(num_claimed))
        connection.endheaders()
        return connection


class Flood(Hostile):
    """Sends requests without a pause; there are sixteen of them."""

    kind = "flood"

    def send(self, asking: Asking) -> None:
        """Read it to its end."""
        self.send_operations(self.bodies.flood(), asking)


class HugeBody(Hostile):
    """Sends bodies that no request needs."""

    kind = "huge-body"
    pauses_s = (1.0, 2.0)

    def send(self, asking: Asking) -> None:
        """Have it refused: for what it is, or for the size that it claims."""
        if self.bodies.is_one_in(3):
            status, code = self._claimed()
        else:
            try:
                with self.request("POST", COMPLETIONS, self.bodies.huge()) as response:
                    status, code = response.status_code, error_of(response.read())
            except ConnectionError:
                status, code = _TOO_LARGE, "closed while it was sent"
        if not _is_refusal(status):
            raise LoadError(f"a huge body was answered with {status} {code}", code)
        asking.outcome = Told.REFUSED

    def _claimed(self) -> tuple[int, str]:
        connection = self.half_request(self.asked.model.max_body_bytes + 1)
        try:
            response = connection.getresponse()
            return response.status, error_of(response.read())
        finally:
            connection.close()


class BreakOff(Hostile):
    """Breaks connections off, in the middle of a body or of an answer."""

    kind = "break-off"
    pauses_s = (0.05, 0.1)

    def send(self, asking: Asking) -> None:
        """Leave."""
        asking.outcome = Told.LEFT
        if self.bodies.is_one_in(2):
            connection = self.half_request(1000)
            connection.send(b"{" * 500)
            connection.close()
            return
        with self.request("POST", COMPLETIONS, self.bodies.flood()) as response:
            if is_refused(response):
                asking.outcome = Told.REFUSED
                return
            for _ in range(_LINES_READ):
                response.readline(b"\n")


class EndlessBlock(Hostile):
    """Runs code that never ends, in the sandbox."""

    kind = "endless-block"

    def operations(self) -> list[Operation]:
        """Return the code."""
        return [self.bodies.endless()]

    def send(self, asking: Asking) -> None:
        """Have the server end it."""
        try:
            self.send_operations(self.bodies.completion(*self.operations()), asking)
        except LoadError as error:
            if error.code not in _ENDED:
                raise
            asking.outcome = Told.REFUSED


def is_refused(response: HTTPSocketResponse) -> bool:
    """Tell whether a request was refused, as one may be who asks for too much.

    Raises:
        LoadError: It was neither refused nor let in.
    """
    if _is_refusal(response.status_code):
        response.read()
        return True
    check_status(response)
    return False


def _is_refusal(status: int) -> bool:
    return any(status in refusals for refusals in _REFUSALS)


ATTACKS: Final[tuple[type[Client], ...]] = (Flood, HugeBody, BreakOff, EndlessBlock)

__all__ = ["ATTACKS"]
