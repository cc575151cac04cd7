"""The application: ``create_app`` assembles it; nothing happens at import time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI

from app.auth.keys import GivenKeys
from app.components import Components
from app.engine.client import EngineClient
from app.engine.process_engines import LocalTraceEngine
from app.http.errors import install_error_handlers
from app.http.gate import HostRules, RequestMiddleware
from app.http.openapi import DocumentedApp
from app.limits.tenant_budget import TenantBudget
from app.routes import (
    admin,
    dictionaries,
    generation,
    jobs,
    pages,
    server,
    stored,
    sweeps,
    traces,
    vllm,
)
from app.server.http_options import HttpOptions
from app.settings import Settings
from app.storage.results import ResultStore

_ROUTERS = (
    generation.router,
    server.router,
    jobs.router,
    jobs.events_router,
    traces.router,
    admin.router,
    stored.vectors_router,
    stored.detectors_router,
    dictionaries.router,
    stored.presets_router,
    sweeps.router,
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
    """Return the server for one engine, see ``Components``; its lifespan starts and closes all of them.

    ``app.state.components.lifecycle.begin_drain()`` rejects new work ahead of the shutdown. ``store`` is
    created from the settings if None.
    """
    http = http or HttpOptions()
    components = Components(
        settings,
        engine,
        store or new_store(settings),
        on_engine_failure=on_engine_failure,
        local=local,
        given_keys=given_keys,
    )
    app = DocumentedApp(
        title="NNsight Engine",
        lifespan=_lifespan,
        openapi_url="/openapi.json" if http.has_docs else None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.components = components
    app.add_middleware(
        RequestMiddleware,
        lifecycle=components.lifecycle,
        request_timeout_s=settings.request_timeout_s,
        hosts=HostRules(settings, components.keys.are_required, http.allowed_origins),
        recording=functools.partial(components.recorder.recording, repeats_id=http.repeats_request_ids),
    )
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


def new_store(settings: Settings) -> ResultStore:
    return ResultStore(
        settings.result_dir,
        ttl_s=settings.result_ttl_s,
        limit=TenantBudget.of(settings).result_bytes,
        replica=settings.replica,
    )


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with app.state.components.running():
        yield
