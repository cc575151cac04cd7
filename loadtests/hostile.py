"""The hostile tenant, active in hostile phases, and its attacks on the server.

A server may serve or reject its requests, and ``refusals`` lists the allowed rejections; any other response
is an error.
"""

from __future__ import annotations

import http.client
from typing import Final
from urllib.parse import urlsplit

import gevent
from geventhttpclient.response import HTTPSocketResponse
from locust import task

from loadtests.bodies import Operation
from loadtests.records import EventKind
from loadtests.refusals import CLOSED, ENDED, EXPECTED, Answer
from loadtests.users import COMPLETIONS, OK, Client, RequestFailedError, UserRequest, error_of, read_stream

_PAUSE_S: Final = 0.2
_LINES_READ: Final = 5


class Hostile(Client):
    """A user that is idle except in hostile phases."""

    abstract = True
    pauses_s = (0.0, 0.0)

    @task
    def attack(self) -> None:
        """Send a request if the phase is hostile."""
        phase = self.environment.phase
        if phase is None or not phase.is_hostile:
            gevent.sleep(_PAUSE_S)
        else:
            self.send_next()

    def send_operations(self, body: bytes, user_request: UserRequest) -> None:
        """Send a completion, and read its stream unless it was rejected."""
        with self.request("POST", COMPLETIONS, body) as response:
            if self.is_refused(response):
                user_request.outcome = EventKind.REFUSED
            else:
                read_stream(response, user_request)

    def is_refused(self, response: HTTPSocketResponse) -> bool:
        """Return whether a request was rejected, in one of the allowed ways.

        Raises:
            LoadError: It was neither rejected in an allowed way nor served.
        """
        if response.status_code == OK:
            return False
        self.check_refusal((response.status_code, error_of(response.read())))
        return True

    def check_refusal(self, answer: Answer) -> None:
        """Raise LoadError if the response is not an allowed rejection of this user's attack."""
        if answer not in EXPECTED[self.kind]:
            status, code = answer
            raise RequestFailedError(f"answered with {status} {code}", code)

    def half_request(self, num_claimed: int) -> http.client.HTTPConnection:
        """Return a connection with a started request that announces ``num_claimed`` bytes."""
        url = urlsplit(self.spec.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=60)
        connection.putrequest("POST", COMPLETIONS)
        for name, value in (*self.headers.items(), ("content-type", "application/json")):
            connection.putheader(name, value)
        connection.putheader("content-length", str(num_claimed))
        connection.endheaders()
        return connection


class Flood(Hostile):
    """Sends requests without a pause, from sixteen users."""

    kind = "flood"

    def send(self, user_request: UserRequest) -> None:
        """Send a request, and read its response to the end."""
        self.send_operations(self.bodies.flood(), user_request)


class HugeBody(Hostile):
    """Sends bodies that are far too large."""

    kind = "huge-body"
    pauses_s = (1.0, 2.0)

    def send(self, user_request: UserRequest) -> None:
        """Send a body that is rejected for its content or size, or only announce a size that is too large."""
        if self.bodies.is_one_in(3):
            answer = self._claimed()
        else:
            try:
                with self.request("POST", COMPLETIONS, self.bodies.huge()) as response:
                    answer = response.status_code, error_of(response.read())
            except ConnectionError:
                answer = CLOSED
        self.check_refusal(answer)
        user_request.outcome = EventKind.REFUSED

    def _claimed(self) -> Answer:
        connection = self.half_request(self.spec.model.max_body_bytes + 1)
        try:
            response = connection.getresponse()
            return response.status, error_of(response.read())
        finally:
            connection.close()


class BreakOff(Hostile):
    """Disconnects in the middle of a body or of a response."""

    kind = "break-off"
    pauses_s = (0.05, 0.1)

    def send(self, user_request: UserRequest) -> None:
        """Send a partial request, or read a part of the response, and disconnect."""
        user_request.outcome = EventKind.DISCONNECTED
        if self.bodies.is_one_in(2):
            connection = self.half_request(1000)
            connection.send(b"{" * 500)
            connection.close()
            return
        with self.request("POST", COMPLETIONS, self.bodies.flood()) as response:
            if self.is_refused(response):
                user_request.outcome = EventKind.REFUSED
                return
            for _ in range(_LINES_READ):
                response.readline(b"\n")


class EndlessBlock(Hostile):
    """Runs code that never ends, in the sandbox."""

    kind = "endless-block"

    def operations(self) -> list[Operation]:
        """Return the code."""
        return [self.bodies.endless()]

    def send(self, user_request: UserRequest) -> None:
        """Wait until the server ends the code."""
        try:
            self.send_operations(self.bodies.completion(*self.operations()), user_request)
        except RequestFailedError as error:
            if error.code not in ENDED:
                raise
            user_request.outcome = EventKind.REFUSED


ATTACKS: Final[tuple[type[Client], ...]] = (Flood, HugeBody, BreakOff, EndlessBlock)

__all__ = ["ATTACKS"]
