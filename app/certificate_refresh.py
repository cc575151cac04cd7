"""Reads the certificate of TLS again when its files have changed, for ``--enable-ssl-refresh``."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import Final

import uvicorn

logger = logging.getLogger(__name__)

POLL_S: Final = 2.0


async def refresh_certificate(config: uvicorn.Config, poll_s: float = POLL_S) -> None:
    """Watch the files until cancelled; existing connections keep the old certificate.

    Polls, because the files may be replaced together with the folder or the link that they lie behind.
    """
    read = _stamps(config)
    while True:
        await asyncio.sleep(poll_s)
        try:
            now = _stamps(config)
            if now != read:
                _load(config)
                read = now
                logger.warning("the certificate has changed and was read again")
        except OSError as error:  # also if the two do not belong together, while they are being replaced
            logger.warning("the changed certificate cannot be read, the old one is used: %s", error)


def _stamps(config: uvicorn.Config) -> list[tuple[int, int]]:
    files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    found = [os.stat(file) for file in files if file]
    return [(one.st_mtime_ns, one.st_ino) for one in found]


def _load(config: uvicorn.Config) -> None:
    if config.ssl is None or config.ssl_certfile is None:
        return
    # A context keeps a certificate whose key does not fit, so the pair is tried in another one.
    for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl):
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)


__all__ = ["POLL_S", "refresh_certificate"]
