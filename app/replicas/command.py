"""``nnsight-engine serve MODEL --replicas N``: the front in this process, its replicas in a Ray cluster.

The cluster is the one named by ``RAY_ADDRESS``, or one that ends with the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Sequence
from typing import Any, Final

import ray
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from rich.console import Console

from app.commands.keys import has_keys
from app.process_environment import cluster_address
from app.replicas.application import no_keys, nodes_of_cluster, replicas_of
from app.replicas.front import create_front
from app.replicas.handles import ServedReplicas
from app.replicas.options import ReplicaOptions
from app.replicas.protocol import Replicas
from app.server.sockets import listening_socket
from app.server.uvicorn import DrainingServer, server_config
from app.settings import Settings
from nnsight_engine.core.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)

_APPLICATION: Final = "nnsight-engine"
_ALL_INTERFACES: Final = "0.0.0.0"  # noqa: S104  # nosec B104 # replicas on several machines, with keys
_POLL_S: Final = 10.0
_OBJECT_STORE_BYTES: Final = 100_000_000
"""Object store size: no large objects pass through Ray."""


class RayReplicas:
    def __init__(self, options: ReplicaOptions, settings: Settings) -> None:
        self._options = options
        self._settings = settings
        self.replicas: list[Replicas] = []
        self._is_own = cluster_address() is None
        self._application = ""

    def connect(self, port: int, *, with_keys: bool) -> None:
        """Start Ray, or join a running cluster; ``port`` tells this front's applications from others'.

        UnsupportedOptionError: there are no keys, and replicas would be reachable from other machines.
        """
        address = cluster_address()
        cluster_options: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
        ray.init(address=address or "local", **({} if address else cluster_options))
        self._application = f"{_APPLICATION}-{socket.gethostname()}-{port}"
        if len(nodes_of_cluster()) > 1:
            if not with_keys:
                raise no_keys("replicas on the cluster's nodes accept connections from other machines")
            self._options = self._options.model_copy(update={"host": _ALL_INTERFACES})

    @property
    def ready(self) -> bool:
        return bool(self.replicas)

    @property
    def alive(self) -> bool:
        """True: Ray Serve restarts replicas that fail."""
        return True

    async def start(self) -> None:
        """Start the replicas, and wait until they serve; why they do not yet is logged."""
        log_task = asyncio.create_task(self._log_unstarted(), name="replicas-waiting")
        try:
            handles = await asyncio.to_thread(self._deploy)
        finally:
            log_task.cancel()
        self.replicas = [ServedReplicas(handle, self._options.wait_s) for handle in handles]

    async def died(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Stop the replicas, each after its drain, and Ray if it was started for them."""
        self.replicas = []
        await asyncio.to_thread(self._shut_down)

    def _deploy(self) -> list[DeploymentHandle]:
        """Deploy each model's replicas as an application of its own, in a thread, until they run."""
        serve.start(proxy_location="Disabled")
        existing = serve.status().applications
        for index in range(len(self._options.models)):
            if self._name(index) in existing:
                logger.warning(
                    "the application %s already exists in the cluster and is replaced: it was left by a "
                    "front that failed, or belongs to another machine with the same name and port",
                    self._name(index),
                )
        targets = [
            serve.RunTarget(
                target=replicas_of(index, self._options, self._settings),
                name=self._name(index),
                route_prefix=None,
            )
            for index in range(len(self._options.models))
        ]
        handles: list[DeploymentHandle] = serve.run_many(targets)
        return handles

    async def _log_unstarted(self) -> None:
        """Log why replicas do not run yet, each reason once."""
        logged: set[str] = set()
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                applications = (await asyncio.to_thread(serve.status)).applications
            except (RayError, RayServeException) as error:
                logger.info("the state of the replicas cannot be read from Ray Serve: %r", error)
                continue
            ours = [applications.get(self._name(index)) for index in range(len(self._options.models))]
            messages = {
                deployment.message
                for application in ours
                if application is not None
                for deployment in application.deployments.values()
            }
            for message in messages - logged - {""}:
                logger.warning("replicas are not ready yet: %s", message)
            logged |= messages

    def _shut_down(self) -> None:
        if not ray.is_initialized():
            return
        for index in range(len(self._options.models)):
            with contextlib.suppress(Exception):  # it may not exist yet
                serve.delete(self._name(index))
        if self._is_own:
            serve.shutdown()
        ray.shutdown()

    def _name(self, index: int) -> str:
        # Names are shared by the whole cluster; an application left by a front that died is replaced.
        return f"{self._application}-{index}"


def run(options: dict[str, Any], settings: Settings, console: Console, *, with_keys: bool) -> None:
    """Serve until the process is asked to stop; ``options`` are the fields of ``ReplicaOptions``."""
    try:
        checked = ReplicaOptions.model_validate(options)
    except ValidationError as error:
        raise UnsupportedOptionError(f"--replicas: {error.errors(include_url=False)[0]['msg']}") from error
    failures: list[str] = []

    def stop(reason: str) -> None:
        failures.append(f"{reason}; Ray's log has more")
        server.should_exit = True

    replicas = RayReplicas(checked, settings)
    app = create_front(
        settings,
        checked,
        lambda: replicas.replicas,
        replicas,
        on_failure=stop,
        are_keys_required=functools.partial(has_keys, settings),
    )
    config = server_config(app, settings)
    server = DrainingServer(config)
    # The socket is bound before the models are loaded, so that a port in use is reported at once.
    sock = listening_socket(config, stall_s=settings.client_stall_timeout_s)
    port = sock.getsockname()[1]
    url = f"http://{settings.host}:{port}"
    replicas.connect(port, with_keys=with_keys)
    # Ray has installed a handler, which uvicorn would restore and call at the end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    async def serve_front() -> None:
        announcing = asyncio.create_task(
            _announce(replicas, checked, url, settings, console, with_keys=with_keys)
        )
        await server.serve(sockets=[sock])
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve_front())
    if failures:
        raise UnsupportedOptionError(failures[0])


async def _announce(
    replicas: RayReplicas,
    options: ReplicaOptions,
    url: str,
    settings: Settings,
    console: Console,
    *,
    with_keys: bool,
) -> None:
    """Say that the front is ready, once its replicas are."""
    while not replicas.ready:  # noqa: ASYNC110 - models take seconds to load
        await asyncio.sleep(0.2)
    names: Sequence[str] = [model.names[0] for model in options.models]
    if settings.log_format == "json":
        logger.setLevel(logging.INFO)
        logger.info("ready", extra={"models": names, "url": url})
        return
    callers = "holders of a key" if with_keys else "this machine only, because there are no keys"
    console.print(f"Ready for {callers}: {', '.join(names)} at {url}.", markup=False, soft_wrap=True)
