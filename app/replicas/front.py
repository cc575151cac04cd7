"""The front: one HTTP address for all replicas of all models. It only decides where a request goes.

Replicas check permissions. A request for data of one replica, such as a result behind a URL, goes to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.presets import split_model
from app.engine.served_model import MODELS
from app.http.bodies import THREAD_BYTES
from app.http.contexts import context_of, while_connected
from app.http.errors import error_response, install_error_handlers
from app.http.gate import HostRules, RequestMiddleware
from app.http.lifecycle import Lifecycle, Phase, Startable
from app.http.vllm_routes import OF_ONE_ENGINE
from app.limits.tenant_budget import TenantBudget
from app.observability.metrics import Metrics
from app.replicas.options import ReplicaOptions
from app.replicas.protocol import ReplicaAddress, Replicas, none_ready
from app.replicas.relay import ForwardedRequest, NotAcceptedError, Relay, is_buffered, reject, relay_socket
from app.replicas.replica_queries import ReplicaQueries
from app.replicas.routing import RequestRoute, owner_of, route_of_body, split_path
from app.server.probes import READY
from app.settings import Settings

_UNVERIFIED_BYTES: Final = 1024 * 1024
"""Size of the part of a body that is buffered before a replica has accepted its sender."""
_EVENTS: Final = "/events"
_MODEL: Final = "nnsight_engine.model"
"""The key of the scope for the model that a path names."""
_TRUE: Final = {"1", "on", "t", "true", "y", "yes"}
"""Values that pydantic parses as true in a query."""


@dataclasses.dataclass(frozen=True, slots=True)
class FrontContext:
    settings: Settings
    lifecycle: Lifecycle
    metrics: Metrics | None = None
    """The metrics of a front are those of its replicas."""


class Front:
    def __init__(
        self, settings: Settings, options: ReplicaOptions, replicas: Callable[[], list[Replicas]]
    ) -> None:
        self._settings = settings
        self._options = options
        self._replicas = replicas
        self._received = TenantBudget.of(settings).received_bytes
        self._queries = ReplicaQueries(options.models, replicas, lambda: self._relay)
        self._index = {name: index for index, model in enumerate(options.models) for name in model.names}
        self._open_relay: Relay | None = None

    async def close(self) -> None:
        if self._open_relay is not None:
            await self._open_relay.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is about all replicas, and forward any other request to one of them."""
        if scope["type"] == "websocket":
            await self._answer_socket(WebSocket(scope, receive, send))
            return
        request = Request(scope, receive)
        path, path_model = scope["path"], scope.get(_MODEL, "")
        answer: Response | None = None
        if path == "/metrics":
            answer = await self._queries.metrics(request)
        elif self._is_for_model_list(request, path_model):
            answer = await self._queries.models(request, path.removeprefix(MODELS).removeprefix("/"))
        elif path in OF_ONE_ENGINE:
            raise _of_one_engine(path)
        elif path in READY:
            answer = await self._queries.ready(request, self._models_for_readiness(path_model))
        elif is_buffered(request):
            answer = await self._count_body(request)
        if answer is not None:
            await answer(scope, receive, send)
            return
        sent = await self._relay.read(request, path)
        owner = owner_of(path)
        if owner:
            await self._forward_to_owner(owner, sent, send)
        else:
            await self._forward(sent, await self._route_of(sent, path_model), send)

    def _is_for_model_list(self, request: Request, path_model: str) -> bool:
        """Return whether a request is for the list of all models, or one of it: no replica has all of it."""
        path = request.scope["path"]
        is_list = path == MODELS or (path.startswith(f"{MODELS}/") and request.method == "GET")
        return is_list and not path_model and len(self._options.models) > 1

    def _models_for_readiness(self, path_model: str) -> list[int]:
        """Return the models that readiness depends on: the named one, or those that always have replicas."""
        if path_model:
            return [self._index[path_model]]
        return [index for index, model in enumerate(self._options.models) if model.replicas]

    async def _count_body(self, request: Request) -> Response | None:
        """Count a buffered body to its key if a replica accepts it, else to the client's address.

        So a client that no replica accepts can occupy only a share of the buffer. Return a rejection, or
        None.
        """
        name = "" if request.client is None else request.client.host
        declared = request.headers.get("content-length", "")
        if not declared.isdecimal() or int(declared[:20]) > _UNVERIFIED_BYTES:
            refusal = await self._queries.refusal(request)
            if refusal is not None:
                return refusal
            key = request.headers.get("authorization", "")
            # Callers without a key are accepted only by a server that this machine alone uses.
            name = f"key {hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}" if key else ""
        context_of(request.scope).received = self._received.spend(name)
        return None

    async def _route_of(self, sent: ForwardedRequest, path_model: str) -> RequestRoute:
        """Return the model and the cache key by which a replica is chosen; a path's model goes first."""
        body = sent.body
        if not body:
            return RequestRoute(path_model)
        key = sent.request.headers.get("authorization", "").encode()

        def parse() -> RequestRoute:
            return route_of_body(body, key, prefix_bytes=self._options.prefix_bytes)

        route = parse() if len(body) < THREAD_BYTES else await asyncio.to_thread(parse)
        return RequestRoute(path_model or route.model, route.key)

    @property
    def _relay(self) -> Relay:
        if self._open_relay is None:
            self._open_relay = Relay(self._settings)
        return self._open_relay

    async def _forward_to_owner(self, owner: str, sent: ForwardedRequest, send: Send) -> None:
        """Forward a request to the one replica that has its data; ``result_not_found`` if it has stopped."""
        scope = sent.request.scope
        answer: Response | None = None
        address = await while_connected(
            sent.receive, self._queries.address_of(owner), context_of(scope).deadline
        )
        if address is not None:
            try:
                answer = await self._relay.answer(sent, address)
            except NotAcceptedError as refusal:
                answer = refusal.answer
        if answer is None:
            raise _no_result()
        await answer(scope, sent.receive, send)

    async def _forward(self, sent: ForwardedRequest, route: RequestRoute, send: Send) -> None:
        """Forward a request to one replica after another until one accepts it; else send the last refusal."""
        replicas = self._replicas_of(route.model)
        scope = sent.request.scope
        tried: set[str] = set()
        answer: Response | None = None
        while True:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    entering = stack.enter_async_context(replicas.acquire(route.key, tried=tried))
                    address = await while_connected(sent.receive, entering, context_of(scope).deadline)
                    if address.name in tried:
                        break
                    tried.add(address.name)
                    reply = await self._relay.answer(sent, address)
                    await reply(scope, sent.receive, send)
                    return
            except NotAcceptedError as refusal:
                answer = refusal.answer or answer
        if answer is None:
            raise none_ready()
        await answer(scope, sent.receive, send)

    def _replicas_of(self, model: str) -> Replicas:
        """Return a model's replicas, also by ``MODEL:PRESET``; of the first one for an unknown name."""
        replicas = self._replicas()
        if not replicas:
            raise none_ready()
        name, _ = split_model(model, self._index)
        return replicas[self._index.get(name, 0)]

    async def _answer_socket(self, websocket: WebSocket) -> None:
        try:
            await self._forward_socket(websocket, websocket.scope["path"])
        except ApiError as error:
            await reject(websocket, error_response(error))

    async def _forward_socket(self, websocket: WebSocket, path: str) -> None:
        """Forward a WebSocket to one replica after another until one accepts it; else reject it.

        Clients that run parts of blocks (``local=true``) are connected with all replicas of all models.
        """
        replicas = self._replicas_of(websocket.scope.get(_MODEL, ""))
        is_local = websocket.query_params.get("local", "").lower() in _TRUE and path.endswith(_EVENTS)
        tried: set[str] = set()
        answer: Response | None = None
        while True:
            async with replicas.acquire(tried=tried) as address:
                if address.name in tried:
                    break
                tried.add(address.name)
                addresses: list[ReplicaAddress] = await self._queries.addresses() if is_local else []
                other_addresses = [other for other in addresses if other.name != address.name]
                try:
                    await relay_socket(websocket, path, address, other_addresses)
                except NotAcceptedError as refusal:
                    answer = refusal.answer or answer
                else:
                    return
        await reject(websocket, answer or error_response(none_ready()))


def create_front(
    settings: Settings,
    options: ReplicaOptions,
    replicas: Callable[[], list[Replicas]],
    started: Startable,
    *,
    on_failure: Callable[[str], None] | None = None,
    are_keys_required: Callable[[], Awaitable[bool]] | None = None,
) -> Starlette:
    """Return the front's ASGI application; ``on_failure`` gets the reason if replicas do not start."""
    front = Front(settings, options, replicas)
    lifecycle = Lifecycle(started, on_failure)

    async def live(_request: Request) -> Response:
        refusal = lifecycle.refusal()
        if lifecycle.phase is Phase.DEAD and refusal is not None:
            return error_response(refusal)
        return JSONResponse({"status": lifecycle.phase})

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(front.close)
            stack.push_async_callback(lifecycle.close)
            lifecycle.start()
            stack.push_async_callback(lifecycle.drain, settings.drain_timeout_s)
            yield

    async def ready(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = lifecycle.refusal() if scope["path"] in READY else None
        await (front if refusal is None else error_response(refusal))(scope, receive, send)

    app = Starlette(routes=[Route("/health/live", live), Mount("/", app=ready)], lifespan=lifespan)
    app.state.components = FrontContext(settings, lifecycle)
    app.add_middleware(
        RequestMiddleware,
        lifecycle=lifecycle,
        request_timeout_s=settings.request_timeout_s,
        hosts=None if are_keys_required is None else HostRules(settings, are_keys_required),
    )
    app.add_middleware(_ModelInPath, options=options)
    install_error_handlers(app)
    return app


class _ModelInPath:
    """Removes Ray Serve's route prefix and a model's name from paths, before other middleware."""

    def __init__(self, app: ASGIApp, options: ReplicaOptions) -> None:
        self._app = app
        self._names = [name for model in options.models for name in model.names]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on without Ray Serve's prefix and the model in its path, which the scope gets."""
        if scope["type"] in {"http", "websocket"}:
            root, full_path = str(scope.get("root_path", "")).rstrip("/"), str(scope["path"])
            path_below_root = full_path.removeprefix(root) if full_path.startswith(f"{root}/") else full_path
            model, path = split_path(path_below_root, self._names)
            if path != full_path:
                scope = {**scope, "root_path": "", "path": path, "raw_path": path.encode()}
            if model:
                scope[_MODEL] = model
        await self._app(scope, receive, send)


def _of_one_engine(path: str) -> ApiError:
    return ApiError(
        ErrorCode.UNSUPPORTED_COMBINATION,
        f"{path} is about one engine, and several replicas serve here: use a server without --replicas, or "
        "another number of replicas.",
    )


def _no_result() -> ApiError:
    return ApiError(
        ErrorCode.RESULT_NOT_FOUND,
        "The replica that stored this result has stopped, and its results are lost; send the request again.",
    )
