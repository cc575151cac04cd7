"""The engine interface; routes and services use nothing else of an engine.

An implementation validates OpenAI's part of a request itself, so that its answers match those of its own
server, and raises ``ApiError`` for the errors of our vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp

from api_schemas.generation import TokenizeRequest
from api_schemas.interventions import Intervention
from api_schemas.jobs import JobStatus
from api_schemas.server import Capabilities
from app.engine.served_model import ServedModel
from nnsight_engine.core.work_context import EngineCounts
from nnsight_engine.remote_backend.frames import Frame, FrameKind, json_frame
from nnsight_engine.remote_backend.messages import TraceRequest


class TraceEngine(Protocol):
    """Runs traces; ``name`` is ``vllm`` or ``local``, by which clients select it."""

    name: str

    def run_trace(self, request: TraceRequest, job_id: str) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a trace; raises ApiError if it cannot be run.

        Yields an ``EVENT`` frame for each ``RUNNING`` and ``LOG`` (JSON of ``JobEvent`` without ``id`` and
        ``job``), ``OUTPUT`` frames if the request streams, then at most one ``OUTPUTS`` and exactly one
        ``RESULT``. A block's exception is part of the result, announced by an ``EVENT`` of ``ERROR`` before
        it. Closing the generator early ends the trace. The request's bytes are untrusted until an engine has
        read them; ``job_id`` is unguessable and unique to the trace.
        """


def event_frame(
    status: JobStatus, *, message: str | None = None, engine: str | None = None, job: str | None = None
) -> Frame:
    event = {"status": status, "time": time.time(), "message": message, "engine": engine, "job": job}
    return json_frame(FrameKind.EVENT, {key: value for key, value in event.items() if value is not None})


JsonObject = dict[str, Any]
"""A JSON object as returned by ``json.loads``."""


@dataclasses.dataclass(slots=True)
class EngineReply:
    """An engine's answer: a complete body or a stream; exactly one of the two is set.

    ``stream`` has complete server-sent events, the last one ``data: [DONE]``. A consumer that stops early
    calls ``aclose`` where the stream has one; the stream must then abort its requests. It may raise
    ``ApiError`` at any event.
    """

    body: JsonObject | None = None
    stream: AsyncIterator[str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DescribedModel:
    """The modules and points of a model that blocks may name; ``spec`` is ``ModelSpec`` as plain values.

    ``outline`` has the modules, parents first: path, class, description, and the path under which the same
    module was listed before, or an empty string.
    """

    outline: list[tuple[str, str, str, str]]
    spec: dict[str, Any]


class EngineClient(Protocol):
    """An engine that serves one model.

    ``completions`` and ``chat`` are cancelled when the client disconnects, and must then abort the request.
    Their arguments:

    - ``body``: the request's JSON without ``interventions``.
    - ``interventions``: validated for shape, not yet resolved against the model.
    - ``http``: the request, its body already read; its ``receive`` belongs to the caller. The tenant of its
      ``RequestContext`` owns the results.
    - ``inline``: whether a complete answer embeds its tensors, however large; for callers within the server.
    """

    @property
    def ready(self) -> bool:
        """False while the engine starts and after it has died."""

    @property
    def alive(self) -> bool:
        """Whether the engine has not died; True before and while it starts."""

    def capabilities(self) -> Capabilities:
        """Return the points and operations that this model supports; only called when ready."""

    async def models(self) -> JsonObject:
        """Return the body of ``/v1/models``; only called when ready."""

    async def completions(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool = False,
    ) -> EngineReply:
        """Answer a body of ``/v1/completions``; the class describes the arguments."""

    async def chat(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool = False,
    ) -> EngineReply:
        """Answer a body of ``/v1/chat/completions``; the class describes the arguments."""

    async def vllm_app(
        self,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        streams: bool,
        in_background: bool = False,
    ) -> ASGIApp:
        """Return vLLM's own application for one request, on a route of ``app.http.vllm_routes``.

        With ``in_background`` it ends with the response that it works on, not with its answer.
        """

    def check_passed_body(self, path: str, fields: JsonObject) -> None:
        """Raise ApiError for a body that would cost too much, before it is passed on to ``vllm_app``."""

    async def tokenize(self, request: TokenizeRequest, http: Request) -> EngineReply:
        """Return the tokens of a text or a conversation; only called when ready."""

    def served(self) -> ServedModel:
        """Return the served model's names and identity; the fingerprint only when ready."""

    async def describe_model(self) -> DescribedModel:
        """Return the model's modules and points; only called when ready."""

    def num_waiting(self) -> Mapping[str, int]:
        """Return the requests that wait before the engine, by the resource; called in every phase."""

    def trace_engines(self) -> Mapping[str, TraceEngine]:
        """Return the trace engines by name; known before the start, used only when ready."""

    async def count_events(self) -> EngineCounts:
        """Return the counters since the start; only when ready. Poll rarely: it answers between two steps."""

    async def prepare_sandbox(self) -> None:
        """Wait until sandboxed code can run, seconds the first time; only called when ready.

        Raises:
            ApiError: ``sandbox_missing``.
        """

    async def start(self) -> None:
        """Load the model without blocking the event loop; called again after ``close`` if it has died."""

    async def died(self) -> None:
        """Wait until the started engine has died; an engine that hangs is killed and counts as dead."""

    async def close(self) -> None:
        """Stop the engine and free all resources; also after a start that failed or was cancelled."""
