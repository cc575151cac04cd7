"""``nnsight-engine serve MODEL --replicas N``: the front in this process, its replicas in a Ray cluster.

The cluster is the one named by ``RAY_ADDRESS``, or one that is started for the command and stopped with it.
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

from app.keys_command import has_keys
from app.listen_socket import listening_socket
from app.observability.logs import is_json
from app.process_environment import cluster_address
from app.replicas.application import no_keys, nodes_of_cluster, replicas_of
from app.replicas.front import create_front
from app.replicas.handles import ServedReplicas
from app.replicas.options import ReplicaOptions
from app.replicas.protocol import Replicas
from app.server import DrainingServer, server_config
from app.settings import Settings
from nnsight_engine.core.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)

_APPLICATION: Final = "nnsight-engine"
_ANY_HOST: Final = "0.0.0.0"  # noqa: S104  # nosec B104 # replicas on several machines, with keys
_LOOK_S: Final = 10.0
_OBJECT_STORE_BYTES: Final = 100_000_000
"""Object store size: no large objects pass through Ray."""


class RayReplicas:
    """The replicas of all models, for the lifetime of the front.

    Args:
        options: The options of the replicas.
        settings: The front's settings.
    """

    def __init__(self, options: ReplicaOptions, settings: Settings) -> None:
        """Start nothing yet; Ray runs already."""
        self._options = options
        self._settings = settings
        self.replicas: list[Replicas] = []
        self._is_own = cluster_address() is None
        self._application = ""

    def connect(self, port: int, *, with_keys: bool) -> None:
        """Start Ray, or join the existing cluster.

        Args:
            port: The front's port, which distinguishes its applications from those of other fronts.
            with_keys: Whether there are keys.

        Raises:
            UnsupportedOptionError: There are no keys, and replicas would listen to other machines.
        """
        address = cluster_address()
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        ray.init(address=address or "local", **({} if address else own))
        self._application = f"{_APPLICATION}-{socket.gethostname()}-{port}"
        if len(nodes_of_cluster()) > 1:
            if not with_keys:
                raise no_keys("the cluster has several nodes, on which replicas listen to other machines")
            self._options = self._options.model_copy(update={"host": _ANY_HOST})

    @property
    def ready(self) -> bool:
        """Whether all models are served."""
        return bool(self.replicas)

    @property
    def alive(self) -> bool:
        """True: Ray Serve restarts replicas that fail."""
        return True

    async def start(self) -> None:
        """Start the replicas, and wait until all have generated a token.

        Raises:
            RuntimeError: One of them does not start.
        """
        log_task = asyncio.create_task(self._log_unstarted(), name="replicas-waiting")
        try:
            handles = await asyncio.to_thread(self._deploy)
        finally:
            log_task.cancel()
        self.replicas = [ServedReplicas(one, self._options.wait_s) for one in handles]

    async def died(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Stop the replicas, each after its drain, and Ray if it was started for them."""
        self.replicas = []
        await asyncio.to_thread(self._end)

    def _deploy(self) -> list[DeploymentHandle]:
        serve.start(proxy_location="Disabled")
        there = serve.status().applications
        for index in range(len(self._options.models)):
            if self._name(index) in there:
                logger.warning(
                    "the application %s already exists in the cluster and is replaced: a front that failed "
                    "left it, or another machine of the same name has one on the same port",
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
        """Log Ray Serve's reasons for replicas that do not start, such as missing resources."""
        logged: set[str] = set()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                applications = (await asyncio.to_thread(serve.status)).applications
            except (RayError, RayServeException) as error:
                logger.info("the state of the replicas cannot be read from Ray Serve: %r", error)
                continue
            ours = [applications.get(self._name(index)) for index in range(len(self._options.models))]
            found = {its.message for one in ours if one is not None for its in one.deployments.values()}
            for message in found - logged - {""}:
                logger.warning("replicas are not ready yet: %s", message)
            logged |= found

    def _end(self) -> None:
        if not ray.is_initialized():
            return
        for index in range(len(self._options.models)):
            with contextlib.suppress(Exception):  # it was not there yet
                serve.delete(self._name(index))
        if self._is_own:
            serve.shutdown()
        ray.shutdown()

    def _name(self, index: int) -> str:
        # As others of the cluster have theirs; one that was left behind by a front that died is replaced.
        return f"{self._application}-{index}"


def run(options: dict[str, Any], settings: Settings, console: Console, *, with_keys: bool) -> None:
    """Serve until the process is asked to stop.

    Args:
        options: The fields of ``ReplicaOptions``.
        settings: The server's settings.
        console: Receives progress messages.
        with_keys: Whether there are keys.

    Raises:
        UnsupportedOptionError: An option is invalid, or the replicas did not start.
    """
    try:
        checked = ReplicaOptions.model_validate(options)
    except ValidationError as error:
        raise UnsupportedOptionError(f"--replicas: {error.errors(include_url=False)[0]['msg']}") from error
    failures: list[str] = []

    def stop() -> None:
        failures.append("the replicas did not start; their errors are above, or in Ray's log")
        server.should_exit = True

    started = RayReplicas(checked, settings)
    app = create_front(
        settings,
        checked,
        lambda: started.replicas,
        started,
        on_failure=stop,
        are_keys_required=functools.partial(has_keys, settings),
    )
    config = server_config(app, settings)
    server = DrainingServer(config)
    # Bound before the models are loaded: a port that is taken is known at once.
    sock = listening_socket(config, stall_s=settings.client_stall_timeout_s)
    port = sock.getsockname()[1]
    url = f"http://{settings.host}:{port}"
    started.connect(port, with_keys=with_keys)
    # Ray has taken the signal, and uvicorn gives it back in the end to whoever had it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    async def serve_front() -> None:
        announcing = asyncio.create_task(
            _announce(started, checked, url, settings, console, with_keys=with_keys)
        )
        await server.serve(sockets=[sock])
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve_front())
    if failures:
        raise UnsupportedOptionError(failures[0])


async def _announce(
    started: RayReplicas,
    options: ReplicaOptions,
    url: str,
    settings: Settings,
    console: Console,
    *,
    with_keys: bool,
) -> None:
    """Print that the replicas serve."""
    while not started.ready:  # noqa: ASYNC110 - models take seconds to load
        await asyncio.sleep(0.2)
    names: Sequence[str] = [one.names[0] for one in options.models]
    if is_json(settings):
        logger.setLevel(logging.INFO)
        logger.info("ready", extra={"models": names, "url": url})
        return
    who = "holders of a key" if with_keys else "this machine alone, there are no keys"
    console.print(f"Ready for {who}: {', '.join(names)} at {url}.", markup=False, soft_wrap=True)


__all__ = ["RayReplicas", "run"]
