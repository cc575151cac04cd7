"""The base class of a run's users: connection, bodies, and reports to locust.

Each user sends one request after another. A request is one event ``E2E``, with one ``TTFT`` if it streams and
one ``ITL`` for each further token, so that locust's reports include all of them by kind and phase.
"""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar, Final

import gevent
import msgspec
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketResponse
from locust import User
from locust.env import Environment

from loadtests.asked import TENANT_OF, Asked, Phase
from loadtests.bodies import Bodies
from loadtests.records import Told
from loadtests.streams import Stream

COMPLETIONS: Final = "/v1/completions"
OK: Final = 200
_CONNECT_S: Final = 10.0
_SHOWN: Final = 200


class LoadError(Exception):
    """A request that failed; locust's report groups by the message.

    Attributes:
        code: The server's error code, if there is one.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Load(Environment):
    """One run, as locust's environment.

    Attributes:
        asked: The definition of the run.
        began: The start time, by ``time.perf_counter``.
        num_users: The number of users created so far.
    """

    def __init__(self, asked: Asked, user_classes: list[type[User]], shape: Any) -> None:
        super().__init__(
            user_classes=user_classes, shape_class=shape, host=asked.url, stop_timeout=asked.finish_s
        )
        self.asked = asked
        self.began = time.perf_counter()
        self.num_users = 0

    @property
    def phase(self) -> Phase | None:
        """The current phase, or None after the end."""
        return self.asked.phase_at(time.perf_counter() - self.began)


class Client(User):
    """A user that sends requests of one kind.

    Attributes:
        kind: The kind.
        pauses_s: The range of pauses between two requests, in seconds.
        headers: Headers that authenticate its requests.
    """

    abstract = True
    kind: ClassVar[str]
    pauses_s: ClassVar[tuple[float, float]] = (0.05, 0.25)
    environment: Load

    def __init__(self, environment: Load) -> None:
        """The connection is opened at the first request."""
        super().__init__(environment)
        self.asked = environment.asked
        environment.num_users += 1
        self.bodies = Bodies(self.asked.model, f"{self.asked.seed} {self.kind} {environment.num_users}")
        self.http = HTTPClient.from_url(
            self.asked.url, connection_timeout=_CONNECT_S, network_timeout=self.asked.silence_s
        )
        key = self.asked.keys.get(TENANT_OF[self.kind])
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    def on_stop(self) -> None:
        """Close the connection."""
        self.http.close()

    def wait_time(self) -> float:
        """Return the pause before the next request, in seconds."""
        return self.bodies.pause_s(*self.pauses_s) if self.asked.has_pauses else 0.0

    def request(
        self, method: str, path: str, body: bytes = b"", media_type: str = "application/json"
    ) -> HTTPSocketResponse:
        """Send a request, and return its response once its headers arrived, as a context manager."""
        return self.http.request(method, path, body, {**self.headers, "content-type": media_type})

    def ask(self) -> None:
        """Send a request of the user's kind, and report its outcome."""
        phase = self.environment.phase
        if phase is not None:
            Asking(self, phase).run()

    def send(self, asking: Asking) -> None:
        """Send a request; results are set on ``asking``, and errors are failures of the request."""
        raise NotImplementedError


class Asking:
    """One request of a user.

    Attributes:
        began: When it was sent, by ``time.perf_counter``.
        num_tokens: The number of its tokens, as far as known.
        num_bytes: The size of its response in bytes.
        outcome: How it ended.
    """

    def __init__(self, user: Client, phase: Phase) -> None:
        self.num_tokens = 0
        self.num_bytes = 0
        self.outcome = Told.END
        self._user = user
        self._phase = phase.name
        self.began = time.perf_counter()

    def run(self) -> None:
        """Let the user send it, and report its outcome."""
        failure: Exception | None = None
        try:
            self._user.send(self)
        except (OSError, HTTPParseError, gevent.Timeout, msgspec.DecodeError) as error:
            failure = LoadError(f"{type(error).__name__}: {error}")
        except LoadError as error:
            failure = error
        except gevent.GreenletExit:
            # The run is over, including the time to finish; without this the request would be in no row.
            self._tell(
                self.outcome, time.perf_counter() - self.began, LoadError("it had no end with the run")
            )
            raise
        self._tell(self.outcome, time.perf_counter() - self.began, failure)

    def told_first(self, seconds: float) -> None:
        """Report the time of the first token."""
        self._tell(Told.FIRST, seconds)

    def told_gap(self, seconds: float) -> None:
        """Report the time of another token."""
        self._tell(Told.GAP, seconds)

    def _tell(self, told: Told, seconds: float, failure: Exception | None = None) -> None:
        user = self._user
        user.environment.events.request.fire(
            request_type=told.value,
            name=f"{user.kind} ({self._phase})",
            response_time=1e3 * seconds,
            response_length=self.num_bytes,
            exception=failure,
            context={"kind": user.kind, "phase": self._phase, "num_tokens": self.num_tokens},
        )


def read_stream(response: HTTPSocketResponse, asking: Asking) -> None:
    """Read a streamed completion to its end.

    Raises:
        LoadError: The response is an error or incomplete.
    """
    check_status(response)
    stream = Stream(asking.began)
    while line := response.readline(b"\n"):
        asking.num_bytes += len(line)
        stream.take(line, time.perf_counter())
    asking.num_tokens = stream.num_tokens
    if stream.first_s is not None:
        asking.told_first(stream.first_s)
    for gap_s in stream.gaps_s:
        asking.told_gap(gap_s)
    if failure := stream.failure():
        raise LoadError(failure, stream.error)


def check_status(response: HTTPSocketResponse, wanted: int = OK) -> None:
    """Check the status of a response.

    Raises:
        LoadError: It is another one.
    """
    if response.status_code != wanted:
        code = error_of(response.read())
        raise LoadError(f"{response.status_code} {code}", code)


def error_of(body: bytes) -> str:
    """Return the code of an error's body, or the beginning of any other body."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return body[:_SHOWN].decode(errors="replace")


__all__ = [
    "COMPLETIONS",
    "OK",
    "Asking",
    "Client",
    "Load",
    "LoadError",
    "check_status",
    "error_of",
    "read_stream",
]
