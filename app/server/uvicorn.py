"""Runs uvicorn with a graceful drain at the first signal and with time limits on clients.

With ``--enable-ssl-refresh`` the certificate of TLS is read again when its files have changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from types import FrameType
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from app.http.lifecycle import Lifecycle, Phase
from app.server.probes import EventLoopWatchdog, ProbedComponents, ProbeServer
from app.server.sockets import HeadLimits, listening_socket, protocol_with_head_limits
from app.settings import Settings

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 5
"""How long connections may take to close after their requests have completed or were ended."""

_MAX_SOCKET_MESSAGE_BYTES: Final = 2 * 2**20


class DrainingServer(uvicorn.Server):
    @property
    def _components(self) -> ProbedComponents:
        app: Any = self.config.app
        components: ProbedComponents = app.state.components
        return components

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Reject new work; at the second signal stop waiting, and restore the default handler for a third."""
        lifecycle = self._components.lifecycle
        if self._captured_signals:
            logger.warning("ending requests and engine; a third signal ends the process at once")
            self.force_exit = True
            lifecycle.give_up()
            signal.signal(sig, signal.SIG_DFL)
        else:
            awaited = _describe_wait(lifecycle, self._components.settings.drain_timeout_s)
            logger.warning("shutting down: %s; a second signal ends this sooner", awaited)
        lifecycle.begin_drain()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections on a thread that answers probes itself."""
        await super().startup(sockets=[])
        if sockets is None:
            sockets = [
                listening_socket(self.config, stall_s=self._components.settings.client_stall_timeout_s)
            ]
        watch = EventLoopWatchdog(self._components.metrics)
        self._beating = asyncio.create_task(watch.beat(), name="loop-watch")
        self.servers: list[Any] = [ProbeServer(sock, self, watch, self._components) for sock in sockets]
        for server in self.servers:
            server.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down like uvicorn, but only after draining.

        uvicorn would close its port first, so that late clients and ``/health/ready`` would get no response.
        """
        await self._components.lifecycle.drain(self._components.settings.drain_timeout_s)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips it then, and with it the end of the engine's processes
            await self.lifespan.shutdown()
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)


def _describe_wait(lifecycle: Lifecycle, limit_s: float) -> str:
    """Return what a shutdown waits for, for the log."""
    number = lifecycle.num_in_flight
    if number:
        return f"waiting up to {limit_s:g} s for {number} request{'s' if number > 1 else ''}"
    is_loading = lifecycle.phase is Phase.STARTING
    return f"closing the engine{', once it has loaded the model' if is_loading else ''}"


def server_config(
    app: ASGIApp, settings: Settings, *, head_limits: HeadLimits | None = None, **listening: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration; ``listening`` has its options of a Unix socket, ``uds``, or of TLS."""
    return uvicorn.Config(
        app,
        **listening,
        host=settings.host,
        port=settings.port,
        log_config=None,  # the project's configuration covers uvicorn's loggers
        access_log=False,  # the project logs each request itself
        timeout_keep_alive=75,
        proxy_headers=bool(settings.trusted_proxies.strip()),
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_graceful_shutdown=_CLOSE_S,
        http=protocol_with_head_limits(
            settings.upload_idle_timeout_s,
            reads_forwarded=settings.proxy_header == "forwarded",
            limits=head_limits,
        ),
        # A partially received WebSocket message is not counted as received; clients send pieces of 1 MiB.
        ws_max_size=_MAX_SOCKET_MESSAGE_BYTES,
    )


POLL_S: Final = 2.0


async def refresh_certificate(config: uvicorn.Config, poll_s: float = POLL_S) -> None:
    """Watch the files until cancelled; existing connections keep the old certificate.

    Polls, because the files may be replaced together with the folder or the link that they lie behind.
    """
    loaded = _file_stamps(config)
    while True:
        await asyncio.sleep(poll_s)
        try:
            current = _file_stamps(config)
            if current != loaded:
                _load_certificate(config)
                loaded = current
                logger.warning("the certificate has changed and was read again")
        except OSError as error:  # also if the two do not belong together, while they are being replaced
            logger.warning("the changed certificate cannot be read, the old one is used: %s", error)


def _file_stamps(config: uvicorn.Config) -> list[tuple[int, int]]:
    """Return the time of change and the inode of each file of the certificate."""
    files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    stats = [os.stat(file) for file in files if file]
    return [(stat.st_mtime_ns, stat.st_ino) for stat in stats]


def _load_certificate(config: uvicorn.Config) -> None:
    if config.ssl is None or config.ssl_certfile is None:
        return
    # A context keeps a certificate whose key does not fit, so the pair is tried in another one.
    for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl):
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
