"""Images, audio and videos of requests, as far as the operator lets clients have this server fetch them.

vLLM fetches any URL unless ``--allowed-media-domains`` names hosts: a client could have the server read pages
of its network. vLLM also answers status 500 for most data that cannot be decoded. ``VLLM_MEDIA_CONNECTOR``
selects this class by its name in vLLM's registry.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import aiohttp
from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from api_schemas.errors import clip
from app.process_environment import MEDIA_CONNECTOR

_KINDS: Final = (
    "image", "audio", "video", "image_embedding", "audio_embedding", "video_embedding",
)  # fmt: skip
"""What vLLM's ``fetch_…`` methods fetch."""


class GuardedMediaConnector(MediaConnector):
    """Loads media from ``data:`` URLs, and from hosts and folders that the operator has named."""

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        """Load media as vLLM does, from a URL that is allowed.

        Raises VLLMValidationError for one that is not, VLLMUnprocessableEntityError for a failure.
        """
        self._check_url(url)
        try:
            return super().load_from_url(url, media_io, **options)
        except OSError as error:  # the errors of the package requests are
            raise _unreachable(error) from error

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        """Load media as vLLM does, from a URL that is allowed; raises as ``load_from_url``."""
        self._check_url(url)
        try:
            return await super().load_from_url_async(url, media_io, **options)
        except (OSError, aiohttp.ClientError) as error:
            raise _unreachable(error) from error

    def _check_url(self, url: str) -> None:
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


def _naming_decode_errors(kind: str, fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``fetch_…`` method of vLLM's connector: its decoding errors become the client's, by ``kind``."""

    @functools.wraps(fetch)
    def fetched(*args: Any, **options: Any) -> Any:
        with _decode_errors_named(kind):
            return fetch(*args, **options)

    return fetched


def _naming_decode_errors_async(kind: str, fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``fetch_…`` method of vLLM's connector: its decoding errors become the client's, by ``kind``."""

    @functools.wraps(fetch)
    async def fetched(*args: Any, **options: Any) -> Any:
        with _decode_errors_named(kind):
            return await fetch(*args, **options)

    return fetched


for _kind in _KINDS:
    for _name, _wrap in (
        (f"fetch_{_kind}", _naming_decode_errors),
        (f"fetch_{_kind}_async", _naming_decode_errors_async),
    ):
        setattr(GuardedMediaConnector, _name, _wrap(_kind, getattr(MediaConnector, _name)))


@contextlib.contextmanager
def _decode_errors_named(kind: str) -> Iterator[None]:
    """Raise VLLMValidationError, which names ``kind``, for what decoders raise: they have no common class."""
    try:
        yield
    except (VLLMClientError, ValueError, TypeError):  # wrong requests, to vLLM too
        raise
    except ImportError as error:
        raise VLLMValidationError(
            f"This server cannot decode {kind}: packages that vLLM needs for it are not installed "
            "(vllm[audio] for audio); leave it out, or ask the server's operator"
        ) from error
    except Exception as error:
        reason = clip(str(error).partition("\n")[0].strip())
        raise VLLMValidationError(
            f"Data of the type {kind} in this request cannot be decoded ({type(error).__name__}: {reason})",
            parameter=kind,
        ) from error


def register_connector() -> None:
    MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)(GuardedMediaConnector)


def _unreachable(error: Exception) -> VLLMUnprocessableEntityError:
    return VLLMUnprocessableEntityError(
        f"A media URL could not be fetched ({type(error).__name__}); check it, or send a data: URL"
    )
