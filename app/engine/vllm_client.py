"""The engine client over a real vLLM: vLLM's own serving classes, extended with interventions.

A request without interventions goes through vLLM's request models, serving classes and error handlers and
through no code of ours. With them, it takes the same path while its task carries the call, and the results
are added to each choice of its answer.

vLLM does not detect an engine that hangs; a question to it does. The engine answers between two steps, so a
step that takes too long shows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.usage.usage_lib import UsageContext

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.generation import TokenizeRequest
from api_schemas.interventions import FIELD, Intervention
from api_schemas.operations import Steer, Trace
from api_schemas.server import Capabilities
from app.auth.principal import sandbox_of
from app.engine.answer_parsers import markers_of
from app.engine.call_results import Call, CallResults, InterveningApp, note_stop, with_results
from app.engine.client import DescribedModel, EngineReply, JsonObject, TraceEngine
from app.engine.grammars import Grammars, read_accepted, setup_of
from app.engine.media import register_connector
from app.engine.served_model import ServedModel, describe
from app.engine.vllm_app import BackgroundApp, VLLMApp, counted
from app.engine.vllm_arguments import engine_arguments, message_of
from app.engine.vllm_errors import Refusals, RefusedError, refusal_of, translating_engine_death
from app.engine.vllm_requests import ids_of, refusing, texts_of, tokenize_request
from app.engine.vllm_traces import MAX_TRACE_REQUESTS, VLLMTraceEngine
from app.http.contexts import context_of
from app.limits.slots import Slots
from app.limits.tenant_budget import TenantBudget
from app.process_environment import (
    environment_for_traces,
    is_socket_folder_set,
    set_socket_folder,
    spawn_engines,
)
from app.settings import Settings
from app.storage.open_files import ProcessFolder, claim_memory_folder, claim_socket_folder
from app.storage.results import ResultStore
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.token_texts import TokenTexts
from nnsight_engine.core.work_context import EngineCounts
from nnsight_engine.plans.request_plan import NO_MARKERS
from nnsight_engine.remote_backend.messages import TraceHead, fingerprint_of
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM, carrying
from nnsight_engine.vllm_backend.compat import engine_config
from nnsight_engine.vllm_backend.content_logs import redact_content
from nnsight_engine.vllm_backend.operations_call import InterventionCall
from nnsight_engine.vllm_backend.rpc_results import SharedMemoryResults, common_result
from nnsight_engine.vllm_backend.trace_call import TraceCall
from nnsight_engine.vllm_backend.trace_code import encoded_code, filename_of

_NUM_INTERVALS: Final = 20
"""The number of intervals into which the time limit is divided."""


async def wait_stalled(ask_engine: Callable[[], Awaitable[Any]], limit_s: Callable[[], float]) -> None:
    """Return once the engine has left a question unanswered for too long; any answer, an error too, is one.

    Time is counted in intervals in which this task itself ran: a suspended machine or a frozen container
    stops both sides, and neither has stalled.
    """
    while True:
        task = asyncio.ensure_future(ask_engine())
        try:
            waited_s = 0.0
            while not task.done():
                limit = limit_s()
                if waited_s >= limit:
                    return
                await asyncio.wait({task}, timeout=limit / _NUM_INTERVALS)
                waited_s += limit / _NUM_INTERVALS
            if not task.cancelled():
                task.exception()  # marks the exception as retrieved
        finally:
            task.cancel()
        await asyncio.sleep(limit_s() / _NUM_INTERVALS)


logger = logging.getLogger(__name__)

_WARM_UP_S: Final = 300.0
"""How long an engine whose model is loaded may take to describe itself and to generate a token."""

Serve = Callable[[Any, Request], Awaitable[Any]]


class VLLMEngineClient:
    """Serves one model with vLLM in this process and its engine in another."""

    def __init__(self, args: argparse.Namespace, settings: Settings, store: ResultStore) -> None:
        self._args = args
        self._settings = settings
        self._store = store
        self._engine: InterventionAsyncLLM | None = None
        self._memory_folder: ProcessFolder | None = None
        self._socket_folder: ProcessFolder | None = None
        self._is_ready = False
        self._fingerprint = ""
        self._loading: asyncio.Task[InterventionAsyncLLM] | None = None
        self._described: DescribedModel | None = None
        self._capabilities: Capabilities | None = None
        self._loaded_texts: TokenTexts | None = None
        self._markers = NO_MARKERS
        self.started = asyncio.Event()
        self._vllm_app = VLLMApp(args)
        budget = TenantBudget.of(settings)
        self._sandboxes = Slots(budget.sandboxes, budget.waiting_sandboxed)
        self._grammars = Grammars(settings, environment_for_traces())
        redact_content()
        self._traces: dict[str, TraceEngine] = {
            "vllm": VLLMTraceEngine(lambda: self.engine, self._adapter_of, settings, self._sandboxes)
        }

    @property
    def ready(self) -> bool:
        return self._is_ready and self.alive

    @property
    def alive(self) -> bool:
        return self._engine is None or not self._engine.errored

    @property
    def engine(self) -> InterventionAsyncLLM:
        """The engine; raises ApiError before it has started."""
        if self._engine is None:
            raise ApiError(ErrorCode.STARTING, "The engine is loading the model; try again shortly.")
        return self._engine

    @property
    def _token_texts(self) -> TokenTexts:
        if self._loaded_texts is None:
            self._loaded_texts = TokenTexts(self.engine.renderer.get_tokenizer())
        return self._loaded_texts

    async def start(self) -> None:
        """Load the model in a thread, warm it up and get ready; also after an engine has died."""
        if self.started.is_set():
            spawn_engines()
        self._socket_folder = None if is_socket_folder_set() else claim_socket_folder()
        if self._socket_folder is not None:
            set_socket_folder(self._socket_folder.path)
        # A thread cannot be cancelled: `close` waits for it, so that no engine is left running.
        self._loading = asyncio.create_task(asyncio.to_thread(self._load_engine))
        self._engine = await asyncio.shield(self._loading)
        self._fingerprint = fingerprint_of(self._engine.vllm_config.model_config.hf_config)
        async with asyncio.timeout(_WARM_UP_S):
            await self._engine.describe()
            self._memory_folder = claim_memory_folder()
            self._grammars.use(setup_of(self._engine))
            self._engine.accept_grammars(self._grammars.accept)
            self._engine.handover = (
                None if self._memory_folder is None else SharedMemoryResults(self._memory_folder.path)
            )
            await self._vllm_app.use(self._engine)
            await self._warm_up()
            if not self._args.skip_tokenizer_init:
                await asyncio.to_thread(self._token_texts.text, 0)  # loads the vocabulary
                tools = self._args.tool_call_parser or ""
                self._markers = await asyncio.to_thread(markers_of, self._engine, tools)
        if self.started.is_set():
            gc.collect()  # the dead engine is held by reference cycles; no request waits at this point
        self._is_ready = True
        self.started.set()

    async def died(self) -> None:
        """Wait until the engine has died; one that hangs is killed."""
        watching = asyncio.create_task(self._end_stalled(self.engine), name="engine-stall")
        try:
            await self.engine.died()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _end_stalled(self, engine: InterventionAsyncLLM) -> None:
        """Kill the engine once it hangs; a timeout of 0 disables this."""
        timeout_s, step_s = self._settings.engine_stall_timeout_s, self._settings.trace_step_s
        if not timeout_s:
            return
        try:
            # The time of blocks in a step has its own limits, which are added to the timeout.
            await wait_stalled(engine.is_sleeping, lambda: timeout_s + step_s * engine.num_other_requests)
            logger.error(
                "a step takes longer than engine_stall_timeout_s, %g s: killing the engine", timeout_s
            )
            engine.kill()
        except Exception:
            logger.exception("the engine watchdog has failed: a hanging engine is no longer detected")

    async def _warm_up(self) -> None:
        """Run the model on each engine, so that it is reported ready only after it has worked."""
        tasks = await self.engine.get_supported_tasks()
        for rank in range(self.engine.num_engines):
            if "generate" not in tasks:
                await self._warm_up_pooling(tasks)
                continue
            params = SamplingParams(max_tokens=1, temperature=0.0)
            num_tokens = 0
            async for output in self.engine.generate(
                {"prompt_token_ids": [0]}, params, f"warm-up-{uuid.uuid4()}", data_parallel_rank=rank
            ):
                num_tokens = len(output.outputs[0].token_ids)
            if not num_tokens:
                raise RuntimeError("the engine answers, and generates no token")

    async def _warm_up_pooling(self, tasks: tuple[SupportedTask, ...]) -> None:
        params = PoolingParams(task=self.engine.model_config.get_pooling_task(tasks))
        params.verify(self.engine.model_config)
        async for _ in self.engine.encode({"prompt_token_ids": [0]}, params, f"warm-up-{uuid.uuid4()}"):
            pass

    def _load_engine(self) -> InterventionAsyncLLM:
        """Return the loaded engine, in a thread; UnsupportedOptionError for options that vLLM refuses."""
        for adapter in self._args.lora_modules or ():  # a relative path may be a repository's name
            adapter.path = get_adapter_absolute_path(adapter.path)
        register_connector()
        try:
            arguments = engine_arguments(self._args, self._settings)
            config = engine_config(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        except (OSError, ValueError) as error:  # of vLLM's checks of options and model
            raise UnsupportedOptionError(message_of(error)) from error
        return InterventionAsyncLLM.create(
            config,
            enable_log_requests=arguments.enable_log_requests,
            disable_log_stats=arguments.disable_log_stats,
        )

    async def close(self) -> None:
        """Stop the engine, one that still loads too, and release its folders."""
        self._is_ready = False
        await self._grammars.close()
        loading, self._loading = self._loading, None
        if loading is None:
            return
        (engine,) = await asyncio.gather(loading, return_exceptions=True)
        self._engine, self._fingerprint = None, ""
        if not isinstance(engine, BaseException):
            if engine.output_handler is not None:
                # It would mistake the engine's orderly shutdown for its death.
                engine.output_handler.cancel()
            await asyncio.to_thread(engine.shutdown)
        if self._socket_folder is not None:
            set_socket_folder(None)
        for folder in (self._memory_folder, self._socket_folder):
            if folder is not None:
                folder.release()
        self._memory_folder = self._socket_folder = None

    def capabilities(self) -> Capabilities:
        if self._capabilities is None:  # the same for every engine, since the model is the same
            self._capabilities = describe(self.engine.spec, self._settings)
        return self._capabilities.model_copy(
            update={"adapters": list(self._vllm_app.adapters), "scopes": self._markers.scopes}
        )

    def served(self) -> ServedModel:
        names = self._args.served_model_name or [self._args.model]
        return ServedModel(
            tuple(names),
            self._args.model,
            self._fingerprint,
            self._args.revision or "",
            tuple(self._vllm_app.adapters),
        )

    def _adapter_of(self, head: TraceHead) -> LoRARequest | None:
        """Return the adapter that a trace names; None for the model itself.

        Raises ApiError ``model_not_found`` if it was unloaded since the trace was accepted.
        """
        self.served().check(head)
        return self._vllm_app.adapters.get(head.model)

    async def describe_model(self) -> DescribedModel:
        if self._described is None:
            with translating_engine_death():
                outline = common_result(await self.engine.collective_rpc("outline_model"))
                spec = common_result(await self.engine.collective_rpc("describe_traces"))
            self._described = DescribedModel([tuple(entry) for entry in outline], spec)
        return self._described

    def trace_engines(self) -> Mapping[str, TraceEngine]:
        return self._traces

    async def count_events(self) -> EngineCounts:
        with translating_engine_death():
            return await self.engine.count_events()

    def num_waiting(self) -> Mapping[str, int]:
        return {"sandboxes": self._sandboxes.num_waiting, "grammars": self._grammars.num_waiting}

    async def prepare_sandbox(self) -> None:
        with translating_engine_death():
            await self.engine.prepare_sandbox()

    async def models(self) -> JsonObject:
        """Return vLLM's own list of models, without folders of the server."""
        models = await self._vllm_app.state.openai_serving_models.show_available_models()
        body: JsonObject = models.model_dump()
        return body

    async def completions(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool = False,
    ) -> EngineReply:
        serve = self._vllm_app.serving("openai_serving_completion").create_completion
        answering = self._generate(CompletionRequest, serve, body, interventions, http, inline=inline)
        return await counted(answering, self._vllm_app.state)

    async def chat(
        self,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool = False,
    ) -> EngineReply:
        serve = self._vllm_app.serving("openai_serving_chat").create_chat_completion
        answering = self._generate(ChatCompletionRequest, serve, body, interventions, http, inline=inline)
        return await counted(answering, self._vllm_app.state)

    async def vllm_app(
        self,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        streams: bool,
        in_background: bool = False,
    ) -> ASGIApp:
        """Return vLLM's application for one request, with the call of its interventions if it has some."""
        if in_background:
            return BackgroundApp(self._vllm_app, self._vllm_app.serving("openai_serving_responses"))
        if not interventions:
            return self._vllm_app
        call = await self._new_call(interventions, http, streams=streams)
        return InterveningApp(self._vllm_app, self.engine, self._results_of(call, num_choices=1, http=http))

    def check_passed_body(self, path: str, fields: JsonObject) -> None:
        self._vllm_app.check_body(path, fields)

    async def tokenize(self, request: TokenizeRequest, http: Request) -> EngineReply:
        """Return tokens with their texts; of ids that the client sends, vLLM only checks the request."""
        serving, sent_ids = self._vllm_app.state.serving_tokenization, ids_of(request)
        serve = serving.create_tokenize if sent_ids is None else serving.create_detokenize
        vllm_request = await tokenize_request(request, self.engine.spec)
        refusals = Refusals(request.root.model_dump(exclude_none=True), type(vllm_request).model_fields)
        answer = await self._serve(serve, vllm_request, http, refusals)
        ids: list[int] = answer.tokens if sent_ids is None else sent_ids
        texts = await asyncio.to_thread(texts_of, ids, self._token_texts.text)
        tokens = [{"id": token_id, "text": text} for token_id, text in zip(ids, texts, strict=True)]
        return EngineReply(body={"model": self.served().names[0], "tokens": tokens})

    async def _generate(
        self,
        model: type[Any],
        serve: Serve,
        body: JsonObject,
        interventions: tuple[Intervention, ...],
        http: Request,
        *,
        inline: bool,
    ) -> EngineReply:
        """Answer a body with ``serve``, vLLM's handler of requests of the class ``model``.

        With interventions the task carries their call, and their results are added to the choices.
        """
        request = await read_accepted(model, body, self._grammars.accept, context_of(http.scope).tenant)
        refusals = Refusals(body, model.model_fields)
        if not interventions:
            answer = await self._serve(serve, request, http, refusals)
            if hasattr(answer, "model_dump"):
                return EngineReply(body=answer.model_dump())
            return EngineReply(stream=refusing(answer, refusals))
        if getattr(request, "use_beam_search", False):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "interventions cannot be combined with use_beam_search; drop one of the two",
                "use_beam_search",
            )
        engine = self.engine
        call = await self._new_call(interventions, http, streams=bool(request.stream))
        results = self._results_of(call, request.n or 1, http, inline=inline)
        streams = False
        try:
            with carrying(call):
                answer = await self._serve(serve, request, http, refusals)
            if not hasattr(answer, "model_dump"):
                streams = True
                name = request.model or self.served().names[0]
                return EngineReply(
                    stream=with_results(
                        answer,
                        refusals,
                        engine,
                        results,
                        name,
                        is_chat=isinstance(request, ChatCompletionRequest),
                    )
                )
            answer_body = answer.model_dump()
            for choice in answer_body["choices"]:
                choice[FIELD] = await results.remaining_results(choice["index"])
                note_stop(choice)
            return EngineReply(body=answer_body)
        except ApiError as refusal:
            if call.failure is not None:
                raise call.failure from refusal
            raise
        finally:
            if not streams:
                engine.close_call(call)

    async def _new_call(
        self, interventions: tuple[Intervention, ...], http: Request, *, streams: bool
    ) -> Call:
        """Return the call that carries a request's interventions into the engine: code, or operations."""
        operation, *_ = interventions
        if isinstance(operation, Trace):  # always the only operation
            param = f"{FIELD}.0"
            sandbox = sandbox_of(self._settings, context_of(http.scope).caller)
            if sandbox is not None:
                await self.prepare_sandbox()
            data = await asyncio.to_thread(encoded_code, operation, param)
            call = TraceCall(
                data, name=operation.name or f"{operation.op}_0", param=param,
                filename=filename_of(operation), streams=streams, max_requests=MAX_TRACE_REQUESTS,
                max_bytes=self._settings.max_trace_bytes, sandbox_of=sandbox,
            )  # fmt: skip
            if sandbox is not None:
                call.slot = partial(self._sandboxes.request, sandbox, call)
            return call
        declared = InterventionCall(
            interventions, self.engine.spec, self._token_texts.token, stream=streams, markers=self._markers,
            max_text_bytes=self._settings.inline_json_bytes,
        )  # fmt: skip
        if any(isinstance(op, Steer) and op.vectors is not None for op in interventions):
            await asyncio.to_thread(declared.prepare)
        return declared

    async def _serve(self, serve: Serve, request: Any, http: Request, refusals: Refusals) -> Any:
        """Have a vLLM serving class answer; its refusals become ApiErrors."""
        with refusals:
            try:
                answer = await serve(request, Request({**http.scope, "app": self._vllm_app}, http.receive))
            except ApiError:
                raise
            except Exception as error:
                raise refusal_of(error) from error
            if isinstance(answer, ErrorResponse):
                raise RefusedError.of_answer(answer)
            return answer

    def _results_of(
        self, call: Call, num_choices: int, http: Request, *, inline: bool = False
    ) -> CallResults:
        return CallResults(
            call,
            num_choices,
            context_of(http.scope),
            self._store,
            self._settings,
            self._token_texts.text,
            base_path=str(http.scope.get("root_path", "")),
            inline=inline,
        )
