"""Users with ordinary requests, one class per kind of request."""

from __future__ import annotations

import base64
import json
import time
from typing import ClassVar, Final

import gevent
from locust import task

from api_schemas.jobs import JobStatus
from loadtests.bodies import Operation
from loadtests.run_spec import PLAIN
from loadtests.users import COMPLETIONS, Client, RequestFailedError, UserRequest, check_status, read_stream
from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader
from nnsight_engine.remote_backend.messages import MEDIA_TYPE

_MAX_FRAME_BYTES: Final = 2**30
_ACCEPTED: Final = 202
_POLL_S: Final = 0.1
_JOB_S: Final = 300.0


class CompletionUser(Client):
    """Streams completions."""

    abstract = True

    @task
    def completion(self) -> None:
        """Send one request."""
        self.send_next()

    def body(self) -> bytes:
        """Return the body of a request."""
        return self.bodies.completion(*self.operations())

    def operations(self) -> list[Operation]:
        """Return the operations of a request."""
        return []

    def send(self, user_request: UserRequest) -> None:
        """Send a completion and read its stream to the end."""
        with self.request("POST", COMPLETIONS, self.body()) as response:
            read_stream(response, user_request)


class PlainUser(CompletionUser):
    """Requests completions without operations."""

    kind = PLAIN


class SteeredSameUser(CompletionUser):
    """Steers by a vector that all of these users share."""

    kind = "steered-same"

    def operations(self) -> list[Operation]:
        """Return a steering operation."""
        return [self.bodies.steer(is_same=True)]


class SteeredDifferentUser(CompletionUser):
    """Steers by a new vector each time."""

    kind = "steered-different"

    def operations(self) -> list[Operation]:
        """Return a steering operation."""
        return [self.bodies.steer(is_same=False)]


class LensUser(CompletionUser):
    """Reads the logit lens."""

    kind = "lens"

    def operations(self) -> list[Operation]:
        """Return a lens operation."""
        return [self.bodies.lens()]


class CaptureUser(CompletionUser):
    """Captures the prompt's residual stream."""

    kind = "capture"

    def operations(self) -> list[Operation]:
        """Return a capture operation."""
        return [self.bodies.capture()]


class LongPromptUser(CompletionUser):
    """Sends prompts whose prefill takes a whole step or more."""

    kind = "long-prompt"

    def body(self) -> bytes:
        """Return the body of a request."""
        return self.bodies.long_prompt()


class TraceOperationUser(CompletionUser):
    """Runs code beside a completion."""

    kind = "trace-operation"

    def operations(self) -> list[Operation]:
        """Return an operation with code."""
        return [self.bodies.code()]


class TracingUser(Client):
    """A user that sends traces encoded by the command."""

    abstract = True
    _num_sent: ClassVar[int] = 0

    def message(self) -> bytes:
        """Return the next message."""
        TracingUser._num_sent += 1
        messages = self.spec.messages
        return base64.b64decode(messages[TracingUser._num_sent % len(messages)])


class TraceMessageUser(TracingUser):
    """Sends traces as the library does."""

    kind = "trace-message"

    @task
    def trace(self) -> None:
        """Send one trace."""
        self.send_next()

    def send(self, user_request: UserRequest) -> None:
        """Send a trace and check its response."""
        with self.request("POST", "/v1/traces", self.message(), MEDIA_TYPE) as response:
            check_status(response)
            check_frames(response.read(), user_request)


class JobUser(TracingUser):
    """Submits traces as jobs, and fetches their results."""

    kind = "jobs"

    @task
    def job(self) -> None:
        """Run one job."""
        self.send_next()

    def send(self, user_request: UserRequest) -> None:
        """Submit a job, wait for its end, fetch its result and remove it."""
        with self.request("POST", "/v1/jobs", self.message(), MEDIA_TYPE) as response:
            check_status(response, _ACCEPTED)
            path = f"/v1/jobs/{json.loads(response.read())['id']}"
        end = time.monotonic() + _JOB_S
        while not (status := JobStatus(json.loads(self._get(path))["status"])).is_final:
            if time.monotonic() > end:
                raise RequestFailedError(f"a job must end within {_JOB_S:g} s, it is {status}")
            gevent.sleep(_POLL_S)
        if status is not JobStatus.COMPLETED:
            raise RequestFailedError(f"a job ended as {status}")
        check_frames(self._get(f"{path}/result"), user_request)
        with self.request("DELETE", path) as response:
            response.read()

    def _get(self, path: str) -> bytes:
        with self.request("GET", path) as response:
            check_status(response)
            return response.read()


def check_frames(data: bytes, user_request: UserRequest) -> None:
    """Check that the response to a trace is complete, and count its tokens and bytes.

    Raises:
        LoadError: It is incomplete.
    """
    user_request.num_bytes = len(data)
    reader = FrameReader(_MAX_FRAME_BYTES)
    frames = list(reader.feed(data))
    last = frames[-1] if frames else None
    if last is None or last.kind is not FrameKind.RESULT or not reader.is_between:
        raise RequestFailedError(f"a trace ended with {last.kind.name if last else 'nothing'}")
    user_request.num_tokens = sum(_num_tokens(frame) for frame in frames if frame.kind is FrameKind.OUTPUTS)


def _num_tokens(frame: Frame) -> int:
    return sum(len(one.get("token_ids", ())) for one in frame.json().values() if isinstance(one, dict))


POLITE: Final[tuple[type[Client], ...]] = (
    PlainUser, SteeredSameUser, SteeredDifferentUser, LensUser, CaptureUser, LongPromptUser,
    TraceOperationUser, TraceMessageUser, JobUser,
)  # fmt: skip

__all__ = ["POLITE", "check_frames"]
