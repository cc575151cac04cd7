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

from loadtests.bodies import Bodies
from loadtests.records import EventKind
from loadtests.run_spec import TENANT_OF, LoadPhase, RunSpec
from loadtests.streams import Stream

COMPLETIONS: Final = "/v1/completions"
OK: Final = 200
_CONNECT_S: Final = 10.0
_SHOWN: Final = 200


class RequestFailedError(Exception):
    """A request that failed; locust's report groups by the message.

    Attributes:
        code: The server's error code, if there is one.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class LoadEnvironment(Environment):
    """One run, as locust's environment.

    Attributes:
        spec: The definition of the run.
        began: The start time, by ``time.perf_counter``.
        num_users: The number of users created so far.
    """

    def __init__(self, spec: RunSpec, user_classes: list[type[User]], shape: Any) -> None:
        super().__init__(
            user_classes=user_classes, shape_class=shape, host=spec.url, stop_timeout=spec.finish_s
        )
        self.spec = spec
        self.began = time.perf_counter()
        self.num_users = 0

    @property
    def phase(self) -> LoadPhase | None:
        """The current phase, or None after the end."""
        return self.spec.phase_at(time.perf_counter() - self.began)


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
    environment: LoadEnvironment

    def __init__(self, environment: LoadEnvironment) -> None:
        """The connection is opened at the first request."""
        super().__init__(environment)
        self.spec = environment.spec
        environment.num_users += 1
        self.bodies = Bodies(self.spec.model, f"{self.spec.seed} {self.kind} {environment.num_users}")
        self.http = HTTPClient.from_url(
            self.spec.url, connection_timeout=_CONNECT_S, network_timeout=self.spec.silence_s
        )
        key = self.spec.keys.get(TENANT_OF[self.kind])
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    def on_stop(self) -> None:
        """Close the connection."""
        self.http.close()

    def wait_time(self) -> float:
        """Return the pause before the next request, in seconds."""
        return self.bodies.pause_s(*self.pauses_s) if self.spec.has_pauses else 0.0

    def request(
        self, method: str, path: str, body: bytes = b"", media_type: str = "application/json"
    ) -> HTTPSocketResponse:
        """Send a request, and return its response once its headers arrived, as a context manager."""
        return self.http.request(method, path, body, {**self.headers, "content-type": media_type})

    def send_next(self) -> None:
        """Send a request of the user's kind, and report its outcome."""
        phase = self.environment.phase
        if phase is not None:
            UserRequest(self, phase).run()

    def send(self, user_request: UserRequest) -> None:
        """Send a request; results are set on ``user_request``, and errors are failures of the request."""
        raise NotImplementedError


class UserRequest:
    """One request of a user.

    Attributes:
        began: When it was sent, by ``time.perf_counter``.
        num_tokens: The number of its tokens, as far as known.
        num_bytes: The size of its response in bytes.
        outcome: How it ended.
    """

    def __init__(self, user: Client, phase: LoadPhase) -> None:
        self.num_tokens = 0
        self.num_bytes = 0
        self.outcome = EventKind.END
        self._user = user
        self._phase = phase.name
        self.began = time.perf_counter()

    def run(self) -> None:
        """Let the user send it, and report its outcome."""
        failure: Exception | None = None
        try:
            self._user.send(self)
        except (OSError, HTTPParseError, gevent.Timeout, msgspec.DecodeError) as error:
            failure = RequestFailedError(f"{type(error).__name__}: {error}")
        except RequestFailedError as error:
            failure = error
        except gevent.GreenletExit:
            # The run is over, including the time to finish; without this the request would be in no row.
            self._report(
                self.outcome,
                time.perf_counter() - self.began,
                RequestFailedError("it had not ended when the run ended"),
            )
            raise
        self._report(self.outcome, time.perf_counter() - self.began, failure)

    def report_first_token(self, seconds: float) -> None:
        """Report the time of the first token."""
        self._report(EventKind.FIRST, seconds)

    def report_token_gap(self, seconds: float) -> None:
        """Report the time of another token."""
        self._report(EventKind.GAP, seconds)

    def _report(self, kind: EventKind, seconds: float, failure: Exception | None = None) -> None:
        user = self._user
        user.environment.events.request.fire(
            request_type=kind.value,
            name=f"{user.kind} ({self._phase})",
            response_time=1e3 * seconds,
            response_length=self.num_bytes,
            exception=failure,
            context={"kind": user.kind, "phase": self._phase, "num_tokens": self.num_tokens},
        )


def read_stream(response: HTTPSocketResponse, user_request: UserRequest) -> None:
    """Read a streamed completion to its end.

    Raises:
        LoadError: The response is an error or incomplete.
    """
    check_status(response)
    stream = Stream(user_request.began)
    while line := response.readline(b"\n"):
        user_request.num_bytes += len(line)
        stream.take(line, time.perf_counter())
    user_request.num_tokens = stream.num_tokens
    if stream.first_s is not None:
        user_request.report_first_token(stream.first_s)
    for gap_s in stream.gaps_s:
        user_request.report_token_gap(gap_s)
    if failure := stream.failure():
        raise RequestFailedError(failure, stream.error)


def check_status(response: HTTPSocketResponse, wanted: int = OK) -> None:
    """Check the status of a response.

    Raises:
        LoadError: It is another one.
    """
    if response.status_code != wanted:
        code = error_of(response.read())
        raise RequestFailedError(f"{response.status_code} {code}", code)


def error_of(body: bytes) -> str:
    """Return the code of an error's body, or the beginning of any other body."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return body[:_SHOWN].decode(errors="replace")


__all__ = [
    "COMPLETIONS",
    "OK",
    "Client",
    "LoadEnvironment",
    "RequestFailedError",
    "UserRequest",
    "check_status",
    "error_of",
    "read_stream",
]
