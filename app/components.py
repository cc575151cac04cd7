"""The parts of one server, reached through its application and never through a global."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from app.admission.rates import Rates
from app.audit import AuditLog
from app.auth.keys import GivenKeys, Keys
from app.catalog.catalog import CatalogParts, ContentCache
from app.catalog.detectors import Detectors
from app.catalog.dictionaries import Dictionaries
from app.catalog.presets import Presets
from app.catalog.training import TrainingQueue
from app.catalog.vectors import Vectors
from app.engine.client import EngineClient
from app.engine.process_engines import LocalTraceEngine, SessionTraces
from app.engine.trace_process_pool import TraceProcesses
from app.examples.storing import ExampleStores, store_examples
from app.formats.json_bodies import MAX_JSON_DEPTH, FieldLimits
from app.http.large_bodies import LargeBodyReader
from app.http.lifecycle import Lifecycle, Restarts
from app.limits.slots import Slots
from app.limits.tenant_budget import TenantBudget
from app.observability.metrics import Metrics
from app.observability.recording import Recorder
from app.observability.scraping import Scrape
from app.observability.tracing import tracing_of
from app.process_environment import environment_for_traces
from app.services.jobs.run import JobParts
from app.services.jobs.service import JobService
from app.services.traces import TraceService, model_outline, start_sandbox
from app.settings import Settings
from app.storage.audit import AuditStore
from app.storage.database import Database
from app.storage.keys import KeyStore
from app.storage.results import ResultStore
from nnsight_engine.local_engine.trace_process import ProcessOptions


class Components:
    """Making them does nothing else; ``running`` starts and closes all, the engine and the store too.

    Args:
        store: The store of large results, which the engine must share.
        on_engine_failure: Called with the reason if the engine does not start or dies too often.
        local: The engine for traces of models of the transformers library, not started yet.
        given_keys: Keys beside those of the database.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient,
        store: ResultStore,
        *,
        on_engine_failure: Callable[[str], None] | None = None,
        local: LocalTraceEngine | None = None,
        given_keys: GivenKeys | None = None,
    ) -> None:
        self.settings, self.engine, self.store = settings, engine, store
        budget, bounds = TenantBudget.of(settings), settings.bounds
        restarts = Restarts(
            settings.max_engine_restarts, settings.engine_restart_window_s, bounds.engine_restart_delay_s
        )
        self.lifecycle = Lifecycle(engine, on_engine_failure, restarts)
        self.database = database = Database(settings.data_dir, settings.database_url)
        self.keys = Keys(KeyStore(database), given_keys)
        self.rates = Rates(settings.limits_url)
        self.log = AuditLog(AuditStore(database), settings.audit_days * 86400)
        self.metrics = Metrics(settings.metrics_dir)
        self.tracing = tracing_of(settings)
        self.recorder = Recorder(
            log=self.log, keys=self.keys, metrics=self.metrics, engine=engine, tracing=self.tracing
        )
        self.received, self.sockets = budget.received_bytes, budget.sockets
        field_limits = FieldLimits(
            MAX_JSON_DEPTH, bounds.max_field_objects, bounds.max_field_values, bounds.max_prompt_ids
        )
        self.bodies = LargeBodyReader(field_limits, environment_for_traces(), budget.body_processes)
        self.processes = _process_engines(settings, engine, local)
        self.traces = TraceService(
            {
                **engine.trace_engines(),
                **{process_engine.name: process_engine for process_engine in self.processes},
            }
        )
        self.jobs = JobService(
            JobParts(
                settings=settings,
                database=database,
                lifecycle=self.lifecycle,
                served=engine.served,
                traces=self.traces,
                keys=self.keys,
                rates=self.rates,
                quotas=store.quotas,
                log=self.log,
                watch=self.recorder.job,
            )
        )
        parts = CatalogParts(
            settings, database, engine, store.quotas, ContentCache(settings.bounds.vector_cache_bytes)
        )
        self.vectors, self.detectors = Vectors(parts), Detectors(parts)
        self.dictionaries = Dictionaries(parts)
        self.presets = Presets(parts, self.vectors, self.detectors, self.dictionaries)
        self.trainings = TrainingQueue(settings, engine)
        self.sweeps = Slots(budget.sweeps, budget.waiting_sweeps)
        self.scrape = Scrape(
            self.metrics,
            engine,
            self.lifecycle,
            self.jobs,
            waiting=self._num_waiting,
            stored=self._stored_bytes,
            restarts=lambda: self.lifecycle.num_restarts,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start everything for the length of the block; closes it in the reverse order."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.database.close)
            await self.database.start()
            stack.push_async_callback(self.log.stop)
            self.log.start()
            await self.vectors.count()
            await self.detectors.count()
            await self.presets.count()
            stack.push_async_callback(self.dictionaries.close)
            await self.dictionaries.start()
            stack.push_async_callback(self.bodies.close)
            stack.push_async_callback(self.rates.close)
            stack.push_async_callback(self.keys.close)
            stack.push_async_callback(self.store.close)
            await self.store.start()
            if self.tracing is not None:  # closed after the engine, whose end must not wait for a collector
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            stack.push_async_callback(self.lifecycle.close)
            stack.push_async_callback(self.scrape.close)
            for process_engine in self.processes:
                stack.push_async_callback(process_engine.close)
            stack.push_async_callback(self.jobs.stop)
            await self.jobs.start()
            self.lifecycle.start(self._after_start)
            for process_engine in self.processes:
                process_engine.start(after=self.lifecycle.started())
            stack.push_async_callback(self.lifecycle.drain, self.settings.drain_timeout_s)
            yield

    async def _after_start(self) -> None:
        """Start the sandbox and store the examples, each time that the engine has started."""
        stores = ExampleStores(self.vectors, self.detectors, self.dictionaries)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(start_sandbox(self.settings, self.engine, self.keys))
            tasks.create_task(store_examples(self.settings, self.engine, stores))

    def _num_waiting(self) -> dict[str, int]:
        """Return the requests that wait before the engine, by the name of their queue, for metrics."""
        counts = {process_engine.queue: process_engine.num_waiting for process_engine in self.processes}
        counts |= {"trainings": self.trainings.num_waiting, "sweeps": self.sweeps.num_waiting}
        return {**self.engine.num_waiting(), **counts}

    def _stored_bytes(self) -> dict[str, tuple[int, int]]:
        """Return the used bytes and their limit by store, for metrics."""
        settings = self.settings
        vectors = self.vectors.used_bytes + self.detectors.used_bytes
        return {
            "results": (self.store.used_bytes, settings.result_store_bytes),
            "jobs": (self.jobs.used_bytes, settings.job_store_bytes),
            "vectors": (vectors, settings.vector_store_bytes),
            "dictionaries": (self.dictionaries.used_bytes, settings.dictionary_store_bytes),
            "presets": (self.presets.used_bytes, settings.bounds.preset_store_bytes),
            "bodies": (self.received.used(), settings.max_received_bytes),
        }


def _process_engines(
    settings: Settings, engine: EngineClient, local: LocalTraceEngine | None
) -> list[TraceProcesses]:
    """Return the pools of processes for traces: the local engine, and sessions on vLLM, if there are any."""
    engines: list[TraceProcesses] = [] if local is None else [local]
    vllm = engine.trace_engines().get(SessionTraces.name)
    if vllm is None:
        return engines
    options = ProcessOptions(
        model=engine.served().source,
        max_result_bytes=settings.max_trace_bytes,
        compresses=True,
    )

    async def outline() -> dict[str, Any]:
        return (await model_outline(engine, [vllm.name])).model_dump(mode="json")

    return [*engines, SessionTraces(vllm, outline, options, settings, environment_for_traces())]
