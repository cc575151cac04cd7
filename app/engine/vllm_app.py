"""vLLM's own HTTP application: its routes run here, behind this server's middleware and checks.

It has none of vLLM's middleware and no port, and its lifespan does not run. vLLM makes a response in the
background in a task that nobody waits for. Here such a request lasts until that task has ended: it counts for
its tenant's limits, is metered, and is waited for at a shutdown. Completions and chats are counted for vLLM's
``/load`` here, since vLLM counts in its own routes, which these do not use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, MutableMapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.generate.api_router import register_generate_api_routers
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.factories import register_pooling_api_routers
from vllm.entrypoints.rl.online.api_router import router as pause_router
from vllm.entrypoints.serve.dev.cache.api_router import router as cache_router
from vllm.entrypoints.serve.dev.server_info.api_router import router as info_router
from vllm.entrypoints.serve.dev.sleep.api_router import router as sleep_router
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator.basic import router as basic_router
from vllm.entrypoints.serve.lora.api_router import attach_router as attach_adapter_router
from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize_router
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from api_schemas.errors import ApiError, ErrorCode, excerpt
from app.engine.adapters import AdapterLocks, AdapterModels, check_adapter_request, load_again
from app.engine.answer_parsers import mend_chat, mend_messages, mend_responses
from app.engine.client import EngineReply
from app.engine.stored_responses import is_under_way, stores_of_responses
from app.engine.vllm_errors import cause_of, corrected, raise_message_errors, raise_stream_errors, refusal_of
from app.http.contexts import context_of, note_error
from app.http.errors import error_response
from app.http.vllm_routes import LOAD_ADAPTER, RESPONSES, UNLOAD_ADAPTER

_OURS: Final = (ApiError, EngineDeadError, EngineGenerateError)


class VLLMApp(FastAPI):
    """vLLM's application, over one engine after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(openapi_url=None, docs_url=None, redoc_url=None)
        self.add_middleware(_Corrected)
        self._args = self.state.args = args
        init_exception_handler(self)
        for kind in _OURS:  # vLLM's own handler would end the server
            self.add_exception_handler(kind, _error_answer)
        for router in (basic_router, cache_router, info_router, pause_router, sleep_router):
            self.include_router(router)
        attach_tokenize_router(self)
        root_level = logging.root.level
        attach_adapter_router(self)
        logging.root.setLevel(root_level)  # a library imported for these routes sets it to ERROR
        self._has_routes = False
        self._stored = stores_of_responses()
        self._models: OpenAIServingModels | None = None

    @property
    def adapters(self) -> Mapping[str, LoRARequest]:
        return MappingProxyType({} if self._models is None else self._models.lora_requests)

    def check_body(self, path: str, fields: MutableMapping[str, Any]) -> None:
        """Check a request for an adapter, and the items of a response one by one; raises ApiError.

        vLLM's model tries some sixty classes for each item, and reports the missing parts of each.
        """
        if path in {LOAD_ADAPTER, UNLOAD_ADAPTER}:
            check_adapter_request(fields, takes_adapters=bool(self._args.enable_lora))
        items = fields.get("input")
        for index, item in enumerate(items if path == RESPONSES and isinstance(items, list) else ()):
            try:
                ResponsesRequest.model_validate({"input": [item]})
            except ValidationError as error:
                kind = item.get("type") if isinstance(item, dict) else type(item).__name__
                raise ApiError(
                    ErrorCode.INVALID_VALUE,
                    f"`input.{index}`, of type {excerpt(kind)}, is no item of a response that vLLM knows, or "
                    "lacks fields.",
                    f"input.{index}",
                ) from error
            except (VLLMClientError, ValueError, TypeError):
                return  # the handler says the same

    async def use(self, engine: Any) -> None:
        """Serve with this engine from now on: set up vLLM's state, load adapters again, mend its classes."""
        tasks = await engine.get_supported_tasks()
        if not self._has_routes:  # an engine that is started again has the same
            self._has_routes = True
            register_pooling_api_routers(self, tasks, engine.model_config)
            if "generate" in tasks:
                register_generate_api_routers(self)
        loaded_adapters = list(self.adapters.values())
        if self._models is not None:
            self._args.lora_modules = None  # those of the engine before are loaded, as they were last
        await init_app_state(engine, self.state, self._args, tasks)
        models = self.state.openai_serving_models
        models.__class__ = AdapterModels
        models.lora_resolver_lock = AdapterLocks()
        await load_again(models, loaded_adapters)
        self._models = models
        if "generate" not in tasks:
            return
        for serving in (self.state.openai_serving_completion, self.state.openai_serving_chat):
            raise_stream_errors(serving)
        raise_message_errors(self.state.anthropic_serving_messages)
        tools = self._args.tool_call_parser or ""
        mend_chat(self.state.openai_serving_chat, tools)
        mend_messages(self.state.anthropic_serving_messages, tools)
        mend_responses(self.state.openai_serving_responses, tools)
        for name, store in self._stored.items():
            setattr(self.state.openai_serving_responses, name, store)

    def serving(self, name: str) -> Any:
        """Return vLLM's serving class of this name in its state; ApiError if the model does not generate."""
        serving_class = getattr(self.state, name, None)
        if serving_class is None:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "The model is served to embed or classify, and generates no text; ask /v1/embeddings, "
                "/pooling or /classify.",
                "model",
            )
        return serving_class


class _Corrected:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on vLLM's answer; an error is held until it is complete, and its text corrected."""
        held_messages: list[Message] = []

        async def sent(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if not held_messages and not (is_start and message["status"] >= HTTPStatus.BAD_REQUEST):
                await send(message)
                return
            held_messages.append(message)
            if not is_start and not message.get("more_body", False):
                head, *bodies = held_messages
                text = corrected(b"".join(body.get("body", b"") for body in bodies).decode())
                headers = [header for header in head["headers"] if header[0] != b"content-length"]
                size = str(len(text.encode())).encode()
                await send({**head, "headers": [*headers, (b"content-length", size)]})
                await send({"type": "http.response.body", "body": text.encode()})

        await self._app(scope, receive, sent)


async def _error_answer(_request: Request, error: Exception) -> Response:
    """Answer an exception of one of vLLM's routes as this server does, instead of vLLM's own handler."""
    refusal = refusal_of(error)
    if isinstance(refusal, ApiError):
        return error_response(refusal)
    refused = create_error_response(cause_of(error))
    return JSONResponse(refused.model_dump(), status_code=refused.error.code)


logger = logging.getLogger(__name__)


class BackgroundApp:
    def __init__(self, app: ASGIApp, serving: Any) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer, then wait for the response; the request's deadline ends it."""
        content = bytearray()

        async def watched(message: Message) -> None:
            content.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, watched)
        answer = json.loads(content)
        # Without an id it was refused.
        response_id = answer.get("id") if isinstance(answer, dict) else None
        task: asyncio.Task[None] | None = self._serving.background_tasks.get(response_id)
        if task is not None:
            await _wait_ended(task, scope)
        stored = self._serving.response_store.get(response_id)
        if stored is not None and is_under_way(stored):
            stored.status = "failed"
            if task is None:  # it had ended before the answer
                note_error(scope, "internal_error")


async def _wait_ended(task: asyncio.Task[None], scope: Scope) -> None:
    """Wait for a response's task until the request's deadline, which cancels it; note its error."""
    reached = context_of(scope).deadline.reached
    waited_for: set[asyncio.Future[Any]] = {task, reached}
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(error, Exception):
        note_error(scope, getattr(refusal_of(error), "code", "internal_error"))
        logger.warning("a response in the background has failed: %s", type(error).__name__)
    elif reached.done():
        note_error(scope, reached.result().code)


async def counted(answering: Awaitable[EngineReply], state: State) -> EngineReply:
    """Return the reply; the request counts for ``/load`` until it is complete or its stream is closed."""
    if not state.enable_server_load_tracking:
        return await answering
    state.server_load_metrics += 1
    stream: _CountedStream | None = None
    try:
        reply = await answering
        if reply.stream is not None:
            reply.stream = stream = _CountedStream(reply.stream, state)
        return reply
    finally:
        if stream is None:
            _uncount(state)


def _uncount(state: State) -> None:
    state.server_load_metrics = max(0, state.server_load_metrics - 1)  # vLLM sets it to 0 with a new engine


class _CountedStream:
    def __init__(self, stream: AsyncIterator[str], state: State) -> None:
        self._stream = stream
        self._state: State | None = state

    def __aiter__(self) -> _CountedStream:
        return self

    async def __anext__(self) -> str:
        return await anext(self._stream)

    async def aclose(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            _uncount(state)
        aclose = getattr(self._stream, "aclose", None)
        if aclose is not None:
            await aclose()
