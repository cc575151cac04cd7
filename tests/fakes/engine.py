"""An engine without a model: repeats the prompt's words and makes up results of the right shapes.

For tests of the layers above the engine, and for developing clients against a server that starts at once.
Deterministic: the same request gets the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.generation import TokenizePrompt, TokenizeRequest
from api_schemas.interventions import Intervention, PromptOperations
from api_schemas.server import Capabilities
from app.engine.client import DescribedModel, EngineReply, JsonObject, TraceEngine
from app.engine.responses import choice_json
from app.engine.served_model import ServedModel
from app.formats.json_text import json_bytes
from app.http.contexts import context_of
from app.http.errors import DONE_FRAME
from app.settings import Settings
from app.storage.results import ResultStore
from nnsight_engine.core.work_context import EngineCounts, WorkContext
from tests.fakes.described import DESCRIPTION
from tests.fakes.results import CAPABILITIES, FINGERPRINT, MODEL, collected
from tests.fakes.traces import FakeTraceEngine
from tests.fakes.vllm_app import vllm_app

_DEFAULT_MAX_TOKENS: Final = 16
_MAX_CHOICES: Final = 128
_LOOK_S: Final = 0.01


@dataclasses.dataclass(slots=True)
class FakeBehaviour:
    """Settings of the fake engine; may be changed while it runs.

    Attributes:
        is_starting: The engine is not ready yet, as while a model loads.
        is_dead: The engine has died.
        start_error: Raised by ``start``.
        error: Raised by every generation before its first event.
        stream_error: Raised by every stream after ``num_events_before_error`` events.
        num_events_before_error: See ``stream_error``.
        delay_s: Sleep before each token.
        intervention_s: The engine time that each request with interventions reports as used.
        counts: The counters that it returns.
        count_error: Raised instead of returning the counters.
        pulls: By word: the amounts added to the first number of captured rows, one for each layer.
        source: The model's folder.
    """

    is_starting: bool = False
    is_dead: bool = False
    start_error: Exception | None = None
    error: Exception | None = None
    stream_error: Exception | None = None
    num_events_before_error: int = 1
    delay_s: float = 0.0
    intervention_s: float = 0.0
    counts: EngineCounts = dataclasses.field(default_factory=EngineCounts)
    count_error: Exception | None = None
    pulls: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    source: str = f"/models/{MODEL}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """One choice to be generated: its prompt's words and the words that follow."""

    index: int
    prompt: list[str]
    words: list[str]
    prompt_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """One parsed request."""

    kind: str
    model: str
    choices: list[_Choice]
    interventions: tuple[Intervention, ...]
    base_path: str
    work: WorkContext
    inline: bool
    has_ids: bool

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completion"

    def usage(self) -> JsonObject:
        prompt_tokens = sum(len(choice.prompt) for choice in self.choices)
        completion_tokens = sum(len(choice.words) for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def envelope(self, choices: list[JsonObject], *, is_chunk: bool) -> JsonObject:
        kind = f"{self.kind}.chunk" if is_chunk and self.is_chat else self.kind
        return {"id": "fake-1", "object": kind, "created": 0, "model": self.model, "choices": choices}


class FakeEngineClient:
    """An ``EngineClient`` whose model is made up.

    Args:
        settings: Passed to the results.
        store: Stores large results.
        behaviour: Settings of the fake; ready and healthy by default.

    Attributes:
        traces: The trace engines; tests replace them.
        fake_traces: The default trace engine; tests change its behaviour.
        num_running: The number of requests being generated.
        num_calls: The number of completion and chat requests.
        has_sandbox: Whether ``prepare_sandbox`` was called.
        num_counted: The number of calls of ``count_events``.
        num_starts: The number of successful starts.
    """

    def __init__(
        self, settings: Settings, store: ResultStore, behaviour: FakeBehaviour | None = None
    ) -> None:
        self.behaviour = behaviour or FakeBehaviour()
        self.num_running = 0
        self.num_calls = 0
        self.num_counted = 0
        self.num_starts = 0
        self.has_sandbox = False
        self._vllm_app = vllm_app()
        self.passed_on: tuple[tuple[Intervention, ...], bool] = ((), False)
        self.fake_traces = FakeTraceEngine()
        self.traces: Mapping[str, TraceEngine] = {"vllm": self.fake_traces}
        self._settings = settings
        self._store = store
        self._has_started = False
        self._is_closed = False

    @property
    def ready(self) -> bool:
        return self._has_started and self.alive and not self.behaviour.is_starting

    @property
    def alive(self) -> bool:
        return not (self.behaviour.is_dead or self._is_closed)

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def models(self) -> JsonObject:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "nnsight-engine"}
        return {"object": "list", "data": [card]}

    def served(self) -> ServedModel:
        return ServedModel((MODEL,), self.behaviour.source, FINGERPRINT)

    async def describe_model(self) -> DescribedModel:
        return DESCRIPTION

    def trace_engines(self) -> Mapping[str, TraceEngine]:
        return self.traces

    def num_waiting(self) -> Mapping[str, int]:
        return {"sandboxes": 0}

    async def count_events(self) -> EngineCounts:
        self.num_counted += 1
        await asyncio.sleep(self.behaviour.delay_s)
        if self.behaviour.count_error is not None:
            raise self.behaviour.count_error
        return dataclasses.replace(self.behaviour.counts)

    async def prepare_sandbox(self) -> None:
        self.has_sandbox = True

    async def start(self) -> None:
        if self.behaviour.start_error is not None:
            raise self.behaviour.start_error
        self.num_starts += 1
        self._has_started, self._is_closed, self.behaviour.is_dead = True, False, False

    async def died(self) -> None:
        while self.alive:  # noqa: ASYNC110 - a test sets a flag
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        self._is_closed = True

    async def completions(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool = False,
    ) -> EngineReply:
        prompts = _prompts(body.get("prompt"))
        return await self._generate("text_completion", prompts, body, interventions, http, inline=inline)

    async def chat(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool = False,
    ) -> EngineReply:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError(ErrorCode.INVALID_SHAPE, "'messages' must be a list with at least one message.")
        prompts = [str(messages[-1].get("content", "")).split()]
        return await self._generate("chat.completion", prompts, body, interventions, http, inline=inline)

    async def vllm_app(
        self,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        streams: bool,
        in_background: bool = False,
    ) -> ASGIApp:
        del http, in_background
        self.passed_on = (interventions, streams)
        return self._vllm_app

    def check_passed_body(self, path: str, fields: JsonObject) -> None:
        """Accept every body."""

    async def tokenize(self, wanted: TokenizeRequest, http: Request) -> EngineReply:
        del http
        asked = wanted.root
        if isinstance(asked, TokenizePrompt) and not isinstance(asked.prompt, str):
            tokens = [{"id": token_id, "text": f" t{token_id}"} for token_id in asked.prompt]
            return EngineReply(body={"model": MODEL, "tokens": tokens})
        last = asked.prompt if isinstance(asked, TokenizePrompt) else asked.messages[-1].content
        words = last.split() if isinstance(last, str) else []
        tokens = [{"id": index, "text": f" {word}"} for index, word in enumerate(words)]
        return EngineReply(body={"model": MODEL, "tokens": tokens})

    async def _generate(
        self,
        kind: str,
        prompts: list[list[str]],
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool,
    ) -> EngineReply:
        self.num_calls += 1
        with self._running():
            await asyncio.sleep(self.behaviour.delay_s)
        if self.behaviour.error is not None:
            raise self.behaviour.error
        model = body.get("model") or MODEL
        if model != MODEL:
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND, f"The model served is {MODEL!r}, got {model!r}.", "model"
            )
        choices = _choices(prompts, _number(body, "n") or 1, _max_tokens(body))
        path = str(http.scope.get("root_path", ""))
        has_ids = bool(body.get("return_token_ids"))
        job = _Job(kind, model, choices, interventions, path, context_of(http.scope), inline, has_ids)
        self._note(job)
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return EngineReply(stream=self._events(job, with_usage=with_usage))
        return EngineReply(body=await self._whole(job))

    async def _whole(self, job: _Job) -> JsonObject:
        choices = []
        for choice in job.choices:
            text = "".join(f" {word}" for word in choice.words)
            job.work.meter.noted_tokens += len(choice.words)
            part = _message(job, "message", text) | {"index": choice.index, "finish_reason": "length"}
            span = (0, len(choice.prompt) + len(choice.words) - 1)
            choices.append(part | await self._field(job, choice, span, is_final=True))
        return job.envelope(choices, is_chunk=False) | {"usage": job.usage()}

    async def _events(self, job: _Job, *, with_usage: bool) -> AsyncIterator[str]:
        num_events = 0
        with self._running():
            for choice, step in _turns(job.choices):
                await asyncio.sleep(self.behaviour.delay_s)
                error = self.behaviour.stream_error
                if error is not None and num_events >= self.behaviour.num_events_before_error:
                    raise error
                num_events += 1
                job.work.meter.noted_tokens += 1
                yield await _event(job.envelope([await self._chunk(job, choice, step)], is_chunk=True))
            if with_usage:
                yield await _event(job.envelope([], is_chunk=True) | {"usage": job.usage()})
            yield DONE_FRAME

    async def _chunk(self, job: _Job, choice: _Choice, step: int) -> JsonObject:
        is_final = step == len(choice.words) - 1
        text = f" {choice.words[step]}"
        part = _message(job, "delta", text) | {
            "index": choice.index,
            "finish_reason": "length" if is_final else None,
        }
        if job.has_ids:
            part["token_ids"] = [step % len(choice.prompt)]
        # The first step computes the whole prompt; each later step computes the token before the sampled one.
        stop = len(choice.prompt) + step
        start = 0 if step == 0 else stop - 1
        return part | await self._field(job, choice, (start, stop), is_final=is_final)

    async def _field(
        self, job: _Job, choice: _Choice, span: tuple[int, int], *, is_final: bool
    ) -> JsonObject:
        if not job.interventions:
            return {}
        tokens = choice.prompt + choice.words
        operations = tuple(op for _, op in PromptOperations(job.interventions).of(choice.prompt_index))
        answer = await choice_json(
            collected(operations, range(*span), is_final=is_final, pull=self._pull(choice)),
            store=self._store,
            work=job.work,
            settings=self._settings,
            decode=lambda token_id: f" {tokens[token_id % len(tokens)]}",
            base_path=job.base_path,
            operations=operations,
            inline=job.inline,
        )
        return {"interventions": answer}

    def _note(self, job: _Job) -> None:
        meter = job.work.meter
        meter.prompt_tokens += job.usage()["prompt_tokens"]
        meter.finish_reasons += ["length"] * len(job.choices)
        meter.intervention_s += self.behaviour.intervention_s if job.interventions else 0.0

    def _pull(self, choice: _Choice) -> Sequence[float]:
        """Return the sum of the pulls of the prompt's words, for each layer."""
        pulls = [self.behaviour.pulls[word] for word in choice.prompt if word in self.behaviour.pulls]
        return [sum(layer) for layer in zip(*pulls, strict=True)]

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


def _prompts(raw: Any) -> list[list[str]]:
    if isinstance(raw, str):
        return [raw.split()]
    if isinstance(raw, list) and raw:
        if all(isinstance(item, int) for item in raw):
            return [[f"t{token_id}" for token_id in raw]]
        return [prompt for item in raw for prompt in _prompts(item)]
    raise ApiError(
        ErrorCode.INVALID_SHAPE, "'prompt' must be text, token ids, or a list of either.", "prompt"
    )


def _max_tokens(body: JsonObject) -> int:
    return _number(body, "max_completion_tokens") or _number(body, "max_tokens") or _DEFAULT_MAX_TOKENS


def _number(body: JsonObject, name: str) -> int:
    """Return an integer field of a request, 0 if absent; raise ApiError for other values, as vLLM does."""
    given = body.get(name) or 0
    try:
        return int(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ApiError(ErrorCode.INVALID_VALUE, f"{name!r} must be a whole number.", name) from error


def _choices(prompts: list[list[str]], num_each: int, num_words: int) -> list[_Choice]:
    if not 1 <= num_each <= _MAX_CHOICES:
        raise ApiError(ErrorCode.INVALID_VALUE, f"'n' must be 1 to {_MAX_CHOICES}, got {num_each}.", "n")
    choices: list[_Choice] = []
    for prompt_index, prompt in enumerate(prompts):
        source = prompt or ["word"]
        room = CAPABILITIES.sizes.max_model_len - len(source)
        if not 0 <= num_words <= room:
            message = f"After a prompt of {len(source)} there is room for {room} tokens, got {num_words}."
            raise ApiError(ErrorCode.INVALID_VALUE, message, "max_tokens")
        for variant in range(num_each):
            words = [source[(variant + step) % len(source)] for step in range(num_words)]
            choices.append(_Choice(len(choices), source, words, prompt_index))
    return choices


def _turns(choices: list[_Choice]) -> Iterator[tuple[_Choice, int]]:
    """Yield choices and steps in batch order: the first token of every choice, then the second of each."""
    for step in range(max(len(choice.words) for choice in choices)):
        for choice in choices:
            yield choice, step


def _message(job: _Job, key: str, text: str) -> JsonObject:
    if job.is_chat:
        return {key: {"role": "assistant", "content": text}, "logprobs": None}
    return {"text": text, "logprobs": None}


async def _event(content: JsonObject) -> str:
    return f"data: {(await json_bytes(content)).decode()}\n\n"
