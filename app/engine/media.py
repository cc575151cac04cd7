"""Images, audio and videos of requests, as far as the operator lets clients have this server fetch them.

vLLM fetches any URL unless ``--allowed-media-domains`` names hosts: a client could have the server read pages
of the network that it is in. ``VLLM_MEDIA_CONNECTOR`` selects this class by its name in vLLM's registry.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from app.process_environment import MEDIA_CONNECTOR


class GuardedMediaConnector(MediaConnector):
    """Loads media from ``data:`` URLs, and from hosts and folders that the operator has named."""

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        """Load one.

        Raises:
            VLLMValidationError: The operator has not allowed URLs of this kind.
            VLLMUnprocessableEntityError: The URL cannot be fetched.
        """
        self._check(url)
        try:
            return super().load_from_url(url, media_io, **options)
        except OSError as error:  # those of requests are
            raise _unreachable(error) from error

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        """Load one, like ``load_from_url``."""
        self._check(url)
        try:
            return await super().load_from_url_async(url, media_io, **options)
        except (OSError, aiohttp.ClientError) as error:
            raise _unreachable(error) from error

    def _check(self, url: str) -> None:
        scheme = url.lstrip().partition(":")[0].lower()
        if scheme in {"http", "https"} and not self.allowed_media_domains:
            raise VLLMValidationError(
                "This server fetches no media from other hosts, since its operator has named none with "
                "--allowed-media-domains; send a data: URL"
            )
        if scheme == "file" and self.allowed_local_media_path is None:
            raise VLLMValidationError(
                "This server reads no media from files, since its operator has named no folder with "
                "--allowed-local-media-path; send a data: URL"
            )


def register_connector() -> None:
    """Enter the class in vLLM's registry."""
    MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)(GuardedMediaConnector)


def _unreachable(error: Exception) -> VLLMUnprocessableEntityError:
    return VLLMUnprocessableEntityError(
        f"A media URL could not be fetched ({type(error).__name__}); check it, or send a data: URL"
    )


__all__ = ["GuardedMediaConnector", "register_connector"]
