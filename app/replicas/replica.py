"""One replica: a Ray Serve actor that runs and monitors one server, ``nnsight-engine serve``.

The server drains and restarts its engine itself; if one of the two ends, so does the other, see
``process_guard``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Final

import httpx
import ray
from ray import serve

from app.process_environment import environment_of_replica

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_HTTP_TIMEOUT_S: Final = 5.0
_LOOPBACK: Final = "127.0.0.1"


@dataclasses.dataclass(frozen=True, slots=True)
class ServerOptions:
    """Start options; with 0 ``num_cores`` the engine chooses, ``first_core`` cores are used before it."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    host: str
    num_cores: int
    first_core: int
    stop_s: float


class Replica:
    async def __init__(self, options: ServerOptions) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Start the server, and wait until it has generated a token; RuntimeError if it ends before."""
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._options = options
        address = ray.util.get_node_ip_address() if options.host != _LOOPBACK else _LOOPBACK
        environment = environment_of_replica(
            {**options.environment, **_cluster(options)},
            self._name,
            cores=cores_of(
                options.first_core + context.rank.local_rank * options.num_cores,
                options.num_cores,
                sorted(os.sched_getaffinity(0)),
            ),
        )
        with _reserve_port(options.host) as reserved:
            port: int = reserved.getsockname()[1]
            self._url = f"http://{address}:{port}"
            self._http = httpx.AsyncClient(base_url=self._url, timeout=_HTTP_TIMEOUT_S, trust_env=False)
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - it takes milliseconds; ourselves
                [
                    *(sys.executable, "-m", "app.replicas.process_guard", "serve", *options.arguments),
                    *("--host", options.host, "--port", str(port)),
                ],
                stdin=subprocess.PIPE,  # never written to; closed when this process ends
                start_new_session=True,
                env=environment,
            )
            await self._wait_ready()
        self._watching = asyncio.create_task(self._end_with_server(), name="replica-server")

    async def lease(
        self, key: bytes = b"", tried: Collection[str] = ()
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Count as a running request until the caller ends the call; arguments are for the router."""
        del key, tried
        yield await self.address()
        await asyncio.Event().wait()

    async def address(self) -> tuple[str, str]:
        return self._name, self._url

    async def check_health(self) -> None:
        """Raise if the server has ended; a server that restarts its engine is healthy."""
        response = await self._http.get("/health/live")
        response.raise_for_status()

    async def __del__(self) -> None:
        """Drain and stop the server; Ray Serve calls this once no request is running here."""
        watching = getattr(self, "_watching", None)
        if watching is None:
            return
        watching.cancel()
        await self._stop()

    async def _wait_ready(self) -> None:
        while True:
            if self._process.poll() is not None:
                raise RuntimeError("the replica's server has ended; the log of this actor says why")
            with contextlib.suppress(httpx.TransportError):
                if (await self._http.get("/health/ready")).is_success:
                    return
            await asyncio.sleep(_POLL_S)

    async def _end_with_server(self) -> None:
        """End this actor once its server has ended, so that Ray starts another replica."""
        await self._wait_ended()
        logger.error("the server of the replica %s has ended", self._name)
        with contextlib.suppress(ProcessLookupError):  # the guard may have died alone
            os.killpg(self._process.pid, signal.SIGKILL)
        os._exit(1)  # Ray notices that at once, and starts another

    async def _stop(self) -> None:
        self._process.terminate()
        try:
            async with asyncio.timeout(self._options.stop_s):
                await self._wait_ended()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._wait_ended()
        await self._http.aclose()

    async def _wait_ended(self) -> None:
        while self._process.poll() is None:  # noqa: ASYNC110 - asyncio cannot wait for it
            await asyncio.sleep(_POLL_S)


def cores_of(first_core: int, num_cores: int, cores: Sequence[int]) -> str:
    """Return the cores of a replica in vLLM's notation, from ``first_core`` on; empty if vLLM chooses."""
    chosen = {cores[(first_core + index) % len(cores)] for index in range(num_cores)}
    return ",".join(map(str, sorted(chosen)))


def _cluster(options: ServerOptions) -> dict[str, str]:
    """Return the server's environment: the Ray cluster, and the front's machines as trusted proxies."""
    addresses = {_LOOPBACK}
    if options.host != _LOOPBACK:
        nodes: list[dict[str, Any]] = ray.nodes()
        addresses |= {str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]}
    return {
        "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address),  # for engines whose workers are Ray's
        # The front's header, whatever proxies are in front of it.
        "NNSIGHT_ENGINE_TRUSTED_PROXIES": ",".join(sorted(addresses)),
        "NNSIGHT_ENGINE_PROXY_HEADER": "x-forwarded-for",
    }


def _reserve_port(host: str) -> socket.socket:
    """Return a socket bound to a free port, which the kernel gives to no other process while it is open.

    It does not listen, so the server may bind the port too: both set SO_REUSEADDR.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
    except BaseException:
        reserved.close()
        raise
    return reserved
