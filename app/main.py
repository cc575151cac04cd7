"""The application: ``create_app`` assembles all components; nothing happens at import time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI

from api_schemas.jobs import JobStatus
from app.admission.rates import Rates
from app.audit import AuditLog
from app.auth.keys import Keys
from app.auth.secrets import GivenKeys
from app.detectors.service import DetectorService
from app.detectors.training import DetectorTrainer
from app.dictionaries.service import DictionaryService
from app.engine.client import EngineClient
from app.engine.process_engines import LocalTraceEngine, SessionTraces
from app.engine.trace_process_pool import TraceProcesses
from app.examples.storing import ExampleStores, store_examples
from app.formats.json_bodies import FieldLimits
from app.http.contexts import RequestContext, RequestContextMiddleware
from app.http.errors import install_error_handlers
from app.http.gate import GateMiddleware, HostMiddleware
from app.http.large_bodies import LargeBodyReader
from app.http.lifecycle import Lifecycle, Restarts
from app.http.openapi import DocumentedApp
from app.limits.allowances import ReceivedBytes
from app.limits.tenant_budget import TenantBudget
from app.observability.metrics import Metrics, Scrape
from app.observability.middleware import RecordMiddleware, points_of
from app.observability.tracing import Tracing, tracing_of
from app.process_environment import environment_for_traces
from app.routes import (
    admin,
    detectors,
    dictionaries,
    generation,
    jobs,
    pages,
    presets,
    server,
    traces,
    vectors,
    vllm,
)
from app.routes.context import Context
from app.server.http_options import HttpOptions
from app.services.jobs.dispatch import JobCallers, RunOver
from app.services.jobs.service import JobService
from app.services.presets import PresetService
from app.services.traces import TraceService, model_outline, start_sandbox
from app.settings import Settings
from app.storage.audit import AuditStore
from app.storage.database import Database
from app.storage.keys import KeyStore
from app.storage.results import ResultStore
from app.training import TrainingQueue
from app.vectors.service import VectorService
from app.vectors.training import Trainer
from nnsight_engine.local_engine.trace_process import ProcessOptions

_ROUTERS = (
    generation.completions_router,
    generation.chat_router,
    generation.tokenize_router,
    server.models_router,
    server.capabilities_router,
    generation.results_router,
    jobs.router,
    jobs.events_router,
    server.health_router,
    traces.router,
    server.status_router,
    admin.keys_router,
    admin.tenants_router,
    admin.audit_router,
    server.metrics_router,
    vectors.router,
    detectors.router,
    dictionaries.router,
    presets.router,
    vllm.router,
)


def create_app(
    settings: Settings,
    engine: EngineClient,
    store: ResultStore | None = None,
    *,
    on_engine_failure: Callable[[str], None] | None = None,
    local: LocalTraceEngine | None = None,
    given_keys: GivenKeys | None = None,
    http: HttpOptions | None = None,
) -> FastAPI:
    """Return the server for one engine; its lifespan starts and closes the engine and the store.

    ``app.state.context.lifecycle.begin_drain()`` rejects new work ahead of the shutdown.

    Args:
        store: The store of large results, which the engine must share; created from the settings if None.
        on_engine_failure: Called with the reason if the engine does not start or dies too often.
        local: The engine for traces of models of the transformers library, not started yet.
        given_keys: Keys beside those of the database.
    """
    store, http = store or new_store(settings), http or HttpOptions()
    restarts = Restarts(
        settings.max_engine_restarts, settings.engine_restart_window_s, settings.engine_restart_delay_s
    )
    lifecycle = Lifecycle(engine, on_engine_failure, restarts)
    beside = _process_engines(settings, engine, local)
    engines = {**engine.trace_engines(), **{one.name: one for one in beside}}
    trace_service = TraceService(engines)
    database = Database(settings.data_dir, settings.database_url)
    log = AuditLog(AuditStore(database), settings.audit_days * 86400)
    counted = Metrics(settings.metrics_dir)
    callers, rates = Keys(KeyStore(database), given_keys), Rates(settings.limits_url)
    tracing = tracing_of(settings)
    watch = functools.partial(_watch_job, counted, engine, tracing)
    job_callers = JobCallers(callers, rates, store.stored, settings, watch)
    job_service = JobService(
        settings,
        database,
        trace_service,
        lifecycle,
        engine.served,
        job_callers,
        store.stored,
        log,
    )
    vector_service = VectorService(settings, database, engine, store.stored)
    dictionary_service = DictionaryService(settings, database, engine, store.stored)
    detector_service = DetectorService(settings, database, engine, store.stored, vector_service.cache)
    preset_service = PresetService(
        settings, database, engine, store.stored, vector_service, detector_service, dictionary_service
    )
    trainings = TrainingQueue(settings, engine)

    def waiting() -> dict[str, int]:
        counts = {one.queue: one.num_waiting for one in beside}
        return {**engine.num_waiting(), **counts, "trainings": trainings.num_waiting}

    def stored() -> dict[str, tuple[int, int]]:
        return {
            "results": (store.used_bytes, settings.result_store_bytes),
            "jobs": (job_service.used_bytes, settings.job_store_bytes),
            "vectors": (
                vector_service.used_bytes + detector_service.used_bytes,
                settings.vector_store_bytes,
            ),
            "dictionaries": (dictionary_service.used_bytes, settings.dictionary_store_bytes),
            "presets": (preset_service.used_bytes, settings.preset_store_bytes),
            "bodies": (receiving.num_bytes, settings.max_received_bytes),
        }

    budget = TenantBudget.of(settings)
    receiving = ReceivedBytes(budget.received_bytes)
    context = Context(
        settings,
        engine,
        store,
        lifecycle,
        trace_service,
        job_service,
        database,
        callers,
        rates,
        log,
        vector_service,
        dictionary_service,
        preset_service,
        Trainer(trainings, vector_service),
        detector_service,
        DetectorTrainer(trainings, detector_service),
        receiving,
        LargeBodyReader(field_limits(settings), environment_for_traces(), budget.body_processes),
        counted,
        Scrape(
            counted,
            engine,
            lifecycle,
            job_service,
            waiting=waiting,
            stored=stored,
            restarts=lambda: lifecycle.num_restarts,
        ),
        tracing,
        beside,
    )
    app = DocumentedApp(
        title="NNsight Engine",
        lifespan=_lifespan,
        openapi_url="/openapi.json" if http.has_docs else None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    app.add_middleware(
        GateMiddleware, lifecycle=context.lifecycle, request_timeout_s=settings.request_timeout_s
    )
    app.add_middleware(
        HostMiddleware,
        settings=settings,
        are_keys_required=callers.are_required,
        allowed_origins=http.allowed_origins,
    )
    app.add_middleware(
        RecordMiddleware,
        log=log,
        keys=callers,
        metrics=counted,
        engine=engine,
        tracing=tracing,
        repeats_ids=http.repeats_request_ids,
    )
    app.add_middleware(RequestContextMiddleware)
    http.add_to(app)
    install_error_handlers(app)
    routers = [*_ROUTERS]
    if http.has_docs:
        routers.append(pages.documentation_router)
    if settings.playground:
        routers.append(pages.playground_router)
    for router in routers:
        # The routes are complete; include_router would analyse each of them again, for every application.
        app.router.routes.extend(router.routes)
    return app


def _watch_job(
    metrics: Metrics, engine: EngineClient, tracing: Tracing | None, run: RequestContext, traceparent: str
) -> RunOver:
    span = None if tracing is None else tracing.begin_job(run, traceparent)

    def over(ended: JobStatus | None) -> None:
        if ended is not None:
            metrics.count_job(ended)
        metrics.count_use(run.record, points_of(engine), run.meter.captured_bytes)
        if span is not None:
            span.end(run.record, ended)

    return over


def _process_engines(
    settings: Settings, engine: EngineClient, local: LocalTraceEngine | None
) -> list[TraceProcesses]:
    beside: list[TraceProcesses] = [] if local is None else [local]
    vllm = engine.trace_engines().get(SessionTraces.name)
    if vllm is None:
        return beside
    options = ProcessOptions(
        model=engine.served().source,
        max_result_bytes=settings.max_trace_bytes,
        compresses=settings.compress_results,
    )

    async def outline() -> dict[str, Any]:
        return (await model_outline(engine, [vllm.name])).model_dump(mode="json")

    return [*beside, SessionTraces(vllm, outline, options, settings, environment_for_traces())]


def field_limits(settings: Settings) -> FieldLimits:
    return FieldLimits(
        settings.max_json_depth,
        settings.max_field_objects,
        settings.max_field_values,
        settings.max_prompt_ids,
    )


def new_store(settings: Settings) -> ResultStore:
    return ResultStore(
        settings.result_dir,
        ttl_s=settings.result_ttl_s,
        allowance=TenantBudget.of(settings).result_bytes,
        replica=settings.replica,
    )


async def _after_start(context: Context) -> None:
    stores = ExampleStores(context.vectors, context.detectors, context.dictionaries)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(start_sandbox(context.settings, context.engine, context.keys))
        tasks.create_task(store_examples(context.settings, context.engine, stores))


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(context.database.close)
        await context.database.start()
        stack.push_async_callback(context.log.stop)
        context.log.start()
        await context.vectors.count()
        await context.detectors.count()
        await context.presets.count()
        stack.push_async_callback(context.dictionaries.close)
        await context.dictionaries.start()
        stack.push_async_callback(context.bodies.close)
        stack.push_async_callback(context.rates.close)
        stack.push_async_callback(context.keys.close)
        stack.push_async_callback(context.store.close)
        await context.store.start()
        if context.tracing is not None:  # closed after the engine, whose end must not wait for a collector
            stack.push_async_callback(asyncio.to_thread, context.tracing.close)
        stack.push_async_callback(context.lifecycle.close)
        stack.push_async_callback(context.scrape.close)
        for one in context.processes:
            stack.push_async_callback(one.close)
        stack.push_async_callback(context.jobs.stop)
        await context.jobs.start()
        context.lifecycle.start(functools.partial(_after_start, context))
        for one in context.processes:
            one.start(after=context.lifecycle.started())
        stack.push_async_callback(context.lifecycle.drain, context.settings.drain_timeout_s)
        yield
