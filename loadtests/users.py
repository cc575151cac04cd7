"""What all users of a run have: a connection, bodies, and how they tell locust what became of a request.

Each user sends one request after another. A request is one event ``E2E``, with one ``TTFT`` where it
streams and one ``ITL`` for each further token, so that locust's reports have all of them by kind and phase.
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
    """A request that failed; the message is what locust's report groups by.

    Attributes:
        code: The server's code of the error, where it said one.
    """

    def __init__(self, message: str, code: str = "") -> None:
        """Say what failed."""
        super().__init__(message)
        self.code = code


class Load(Environment):
    """One run, as locust has it.

    Attributes:
        asked: What it consists of.
        began: When it did.
        num_users: How many users there have been.
    """

    def __init__(self, asked: Asked, user_classes: list[type[User]], shape: Any) -> None:
        """Prepare it."""
        super().__init__(
            user_classes=user_classes, shape_class=shape, host=asked.url, stop_timeout=asked.finish_s
        )
        self.asked = asked
        self.began = time.perf_counter()
        self.num_users = 0

    @property
    def phase(self) -> Phase | None:
        """What is on now, or None when all is over."""
        return self.asked.phase_at(time.perf_counter() - self.began)


class Client(User):
    """A user who sends requests of one kind.

    Attributes:
        kind: The kind.
        pauses_s: The least and the most between two requests.
        headers: What requests say of who sends them.
    """

    abstract = True
    kind: ClassVar[str]
    pauses_s: ClassVar[tuple[float, float]] = (0.05, 0.25)
    environment: Load

    def __init__(self, environment: Load) -> None:
        """Connect when the first request is sent."""
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
        """Leave no connection behind."""
        self.http.close()

    def wait_time(self) -> float:
        """Return how long to wait before the next request."""
        return self.bodies.pause_s(*self.pauses_s) if self.asked.has_pauses else 0.0

    def request(
        self, method: str, path: str, body: bytes = b"", media_type: str = "application/json"
    ) -> HTTPSocketResponse:
        """Send a request, and return its answer when its head is there; it is to be left as a context."""
        return self.http.request(method, path, body, {**self.headers, "content-type": media_type})

    def ask(self) -> None:
        """Send a request of the user's kind, and tell what became of it."""
        phase = self.environment.phase
        if phase is not None:
            Asking(self, phase).run()

    def send(self, asking: Asking) -> None:
        """Send it; what it notes in ``asking`` is told, and errors are failures of the request."""
        raise NotImplementedError


class Asking:
    """One request of a user.

    Attributes:
        began: When it was sent.
        num_tokens: Tokens that it had, as far as is known.
        num_bytes: Bytes of its answer.
        outcome: How it ended.
    """

    def __init__(self, user: Client, phase: Phase) -> None:
        """Begin it, in a phase."""
        self.num_tokens = 0
        self.num_bytes = 0
        self.outcome = Told.END
        self._user = user
        self._phase = phase.name
        self.began = time.perf_counter()

    def run(self) -> None:
        """Have the user send it, and tell what became of it."""
        failure: Exception | None = None
        try:
            self._user.send(self)
        except (OSError, HTTPParseError, gevent.Timeout, msgspec.DecodeError) as error:
            failure = LoadError(f"{type(error).__name__}: {error}")
        except LoadError as error:
            failure = error
        except gevent.GreenletExit:
            # The run is over and has waited; without this it would be in no row.
            self._tell(
                self.outcome, time.perf_counter() - self.began, LoadError("it had no end with the run")
            )
            raise
        self._tell(self.outcome, time.perf_counter() - self.began, failure)

    def told_first(self, seconds: float) -> None:
        """Tell of the first token."""
        self._tell(Told.FIRST, seconds)

    def told_gap(self, seconds: float) -> None:
        """Tell of another one."""
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
        LoadError: It is not what was asked for.
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
    """See that a request was let in.

    Raises:
        LoadError: It was refused.
    """
    if response.status_code != wanted:
        code = error_of(response.read())
        raise LoadError(f"{response.status_code} {code}", code)


def error_of(body: bytes) -> str:
    """Return the code of an error's body, or the beginning of what is none."""
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
