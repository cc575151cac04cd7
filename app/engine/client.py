"""What the server asks of an engine; routes know nothing else of it.

Implementations: ``vllm_client`` over a real vLLM, ``fake`` for tests of everything above it.
An implementation validates OpenAI's part of a request itself, so that it answers as its own
server would, and raises ``ApiError`` for what our vocabulary names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.requests import Request

from api_schemas.capabilities import Capabilities
from api_schemas.interventions import Intervention
from api_schemas.tokens import TokenizeRequest
from app.engine.traces import TraceEngine
from app.services.served_model import ServedModel
from nnsight_engine.core.engine_counts import EngineCounts

JsonObject = dict[str, Any]
"""A JSON object as ``json.loads`` gives it."""


@dataclasses.dataclass(slots=True)
class EngineReply:
    """An engine's answer: a whole body, or a stream of events; exactly one of the two is set.

    Attributes:
        body: The JSON object of a whole answer.
        stream: Complete server-sent events (``data: …`` and a blank line), the last one
            ``data: [DONE]``. Ended early, it is closed with ``aclose`` where it has one, and must
            then abort what it runs. It may raise ``ApiError`` at any event.
        headers: Extra response headers.
    """

    body: JsonObject | None = None
    stream: AsyncIterator[str] | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class DescribedModel:
    """What blocks may name in a model.

    Attributes:
        outline: Its modules, parents first: path, class, description, and the path of the same module if it
            was listed before, or nothing.
        spec: Sizes and standard points, ``ModelSpec`` as plain values.
    """

    outline: list[tuple[str, str, str, str]]
    spec: dict[str, Any]


class EngineClient(Protocol):
    """An engine that serves one model.

    ``completions`` and ``chat`` are cancelled when the client goes away, and then must abort the
    request. ``body`` is the request's JSON without ``interventions``, which come checked for
    shape and unresolved against the model; ``owner`` is the tenant whose the results are. With
    ``inline`` a whole answer has its tensors in itself, however large: for callers within the server.
    ``http``
    is the request, its body already read; its ``receive`` belongs to the caller.
    """

    @property
    def ready(self) -> bool:
        """Whether requests are served; False while starting and after death."""

    @property
    def alive(self) -> bool:
        """False once the engine has died; True before and while it starts."""

    def capabilities(self) -> Capabilities:
        """Return what this model offers to interventions; only called when ready."""

    async def models(self) -> JsonObject:
        """Return the body of ``/v1/models``; only called when ready."""

    async def completions(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        owner: str,
        *,
        inline: bool = False,
    ) -> EngineReply:
        """Answer a completion request."""

    async def chat(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        owner: str,
        *,
        inline: bool = False,
    ) -> EngineReply:
        """Answer a chat completion request."""

    async def tokenize(self, wanted: TokenizeRequest, http: Request) -> EngineReply:
        """Answer with the tokens of a text or a conversation; only called when ready."""

    def served(self) -> ServedModel:
        """Return what the model is called; its fingerprint only when ready."""

    async def describe_model(self) -> DescribedModel:
        """Return the model's modules and points; only called when ready."""

    def num_waiting(self) -> Mapping[str, int]:
        """Return how much waits before it reaches the engine, by what it waits for; in every phase."""

    def trace_engines(self) -> Mapping[str, TraceEngine]:
        """Return what runs traces, by name; known before the start, used only when ready."""

    async def count_events(self) -> EngineCounts:
        """Return what the engine has counted since it started; only when ready.

        It answers between two steps, so it is asked rarely.
        """

    async def prepare_sandbox(self) -> None:
        """Wait until code of sandboxed keys can run, which takes seconds the first time; only when ready.

        Raises:
            ApiError: ``sandbox_missing``.
        """

    async def start(self) -> None:
        """Load the model and generate a token; must not hold up the event loop, and raises where it fails.

        Called again after ``close`` where the engine had died.
        """

    async def died(self) -> None:
        """Wait until the engine, which was started, has died; one that hangs is ended, and has died then."""

    async def close(self) -> None:
        """Stop and free everything; also after a start that failed or was cancelled."""
