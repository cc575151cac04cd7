"""Dictionaries on the Hugging Face Hub: the folder that a source means, and the bytes of its files.

A source is untrusted: it names a repository and a folder in it, never a path of this machine. The server
decides which files it reads there, and its caller bounds their bytes as they arrive. Nothing is written to
the Hub's cache, which has no quotas.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import yaml  # type: ignore[import-untyped] # it has no types
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # it is in its reference

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, ErrorCode, clip
from app.addresses import is_loopback
from app.auth.principal import Principal
from app.settings import Settings

WEIGHTS_FILE: Final = "sae_weights.safetensors"
CFG_FILE: Final = "cfg.json"
_PARAM: Final = "source"
_TIMEOUT_S: Final = 30.0
_PIECE_BYTES: Final = 1 << 20
_COMMIT: Final = "x-repo-commit"
_OK: Final = 200
_MISSING: Final = frozenset({401, 403, 404})
"""The Hub's statuses for files that are not there, or not for this caller; it does not tell which."""
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9_.+=:-]*"
_REPOSITORY: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*"
_HF: Final = re.compile(
    rf"hf://(?P<repository>{_REPOSITORY})(?:@(?P<revision>{_PART}))?(?P<path>(?:/{_PART})*)/?"
)
_NAMED: Final = re.compile(
    rf"(?P<table>saelens|neuronpedia)://(?P<first>{_PART})/(?P<rest>{_PART}(?:/{_PART})*)"
)
_OTHER_TYPES: Final = frozenset({"datasets", "spaces", "buckets", "kernels", "models"})
_FACTOR: Final = "norm_scaling_factor"
"""A field of our cfg that SAELens has in its table instead."""
_TABLE: Final = "pretrained_saes.yaml"


@dataclasses.dataclass(frozen=True, slots=True)
class HubFolder:
    """A folder, empty for the repository's own; ``overrides`` replace fields of its cfg."""

    repository: str
    path: str
    revision: str = "main"
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"hf://{self.repository}@{self.revision}{'/' * bool(self.path)}{self.path}"


def is_trusted(settings: Settings, caller: Principal) -> bool:
    """Return whether a caller may use the server's own access to the Hub: its token, and its cache."""
    return Scope.ADMIN in caller.scopes if caller.has_key else is_loopback(settings.host)


def check_hub_allowed(settings: Settings, caller: Principal) -> None:
    allowed = is_trusted(settings, caller) if settings.hub_downloads is None else settings.hub_downloads
    if not allowed:
        raise ApiError(
            ErrorCode.HUB_NOT_ALLOWED,
            "This server does not download from the Hub for you (hub_downloads): that takes a key with the "
            "scope admin, a server without keys on your machine, or NNSIGHT_ENGINE_HUB_DOWNLOADS=1. Or "
            "download the folder yourself, `hf download OWNER/NAME --include 'FOLDER/*' --local-dir .`, and "
            "upload its files.",
            _PARAM,
        )


def folder_of(source: str) -> HubFolder:
    """Return the folder of a source; raises ApiError ``invalid_value``, ``unsupported_dictionary``."""
    table_match = _NAMED.fullmatch(source)
    if table_match is not None:
        return _folder_of_release(source, table_match["table"], table_match["first"], table_match["rest"])
    match = _HF.fullmatch(source)
    if match is None or match["repository"].partition("/")[0] in _OTHER_TYPES:
        raise _invalid_source(
            f"A source is hf://OWNER/NAME/FOLDER, also with a revision, hf://OWNER/NAME@REVISION/FOLDER, "
            f"saelens://RELEASE/ID or neuronpedia://MODEL/SOURCE; got {clip(source)!r}."
        )
    return HubFolder(match["repository"], match["path"].strip("/"), match["revision"] or "main")


@contextlib.asynccontextmanager
async def open_on_hub(
    folder: HubFolder, name: str, max_bytes: int, *, trusted: bool
) -> AsyncIterator[tuple[HubFolder, AsyncIterator[bytes]]]:
    """Yield the folder, at the commit that the file is of, and the file's bytes.

    ``trusted`` uses the server's token and, without network, its cache. Raises ApiError ``not_found``,
    ``hub_unavailable``; ``body_too_large``, also from the bytes.
    """
    if huggingface_hub.is_offline_mode():
        path = await asyncio.to_thread(_cached_file, folder, name, trusted=trusted)
        # The cache has it at …/snapshots/COMMIT/FOLDER/NAME.
        commit = path.parents[len(Path(folder.path).parts)].name
        yield (
            dataclasses.replace(folder, revision=commit),
            _bounded_pieces(_file_pieces(path), name, max_bytes),
        )
        return
    url = huggingface_hub.hf_hub_url(
        folder.repository, name, subfolder=folder.path or None, revision=folder.revision
    )
    # Compressed content could grow without bound as it is unpacked.
    headers = {**build_hf_headers(token=None if trusted else False), "accept-encoding": "identity"}
    async with contextlib.AsyncExitStack() as stack:
        with _translating_errors():
            client = await stack.enter_async_context(huggingface_hub.get_async_session())
            stream = client.stream("GET", url, headers=headers, timeout=_TIMEOUT_S)
            response = await stack.enter_async_context(stream)
        _check_response(response.status_code, response.headers.get("content-encoding"), folder, name)
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise _too_large(name, max_bytes)
        commits = [
            answer.headers[_COMMIT] for answer in (*response.history, response) if _COMMIT in answer.headers
        ]
        commit = commits[0] if commits and re.fullmatch(_PART, commits[0]) else folder.revision
        yield (
            dataclasses.replace(folder, revision=commit),
            _bounded_pieces(_received_pieces(response), name, max_bytes),
        )


def _cached_file(folder: HubFolder, name: str, *, trusted: bool) -> Path:
    if not trusted:
        raise _unavailable("this server has no network (HF_HUB_OFFLINE)")
    path = huggingface_hub.try_to_load_from_cache(
        folder.repository, f"{folder.path}/{name}".lstrip("/"), revision=folder.revision
    )
    if not isinstance(path, str):
        raise _unavailable(f"this server has no network (HF_HUB_OFFLINE), and its cache no {folder}/{name}")
    return Path(path)


def _check_response(status: int, encoding: str | None, folder: HubFolder, name: str) -> None:
    if status in _MISSING:
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"The Hub has no {name} at {folder}, or it is private or gated. A dictionary's folder has "
            f"{CFG_FILE} and {WEIGHTS_FILE}, as SAELens writes them.",
            _PARAM,
        )
    if status != _OK or encoding not in {None, "identity"}:
        raise _unavailable(f"it answered {status}, encoding {clip(encoding or 'none')}")


@contextlib.contextmanager
def _translating_errors() -> Iterator[None]:
    """Raise ApiError for the errors of the Hub's client, whose HTTP package differs between its versions."""
    try:
        yield
    except Exception as error:
        raise _unavailable(clip(f"{type(error).__name__}: {error}")) from error


async def _bounded_pieces(pieces: AsyncIterator[bytes], name: str, max_bytes: int) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large(name, max_bytes)
        yield piece


async def _received_pieces(response: Any) -> AsyncIterator[bytes]:
    pieces = response.aiter_raw(_PIECE_BYTES)
    while True:
        with _translating_errors():
            piece = await anext(pieces, None)
        if piece is None:
            return
        yield piece


async def _file_pieces(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece
    finally:
        file.close()


def _folder_of_release(source: str, table: str, release_or_model: str, sae_name: str) -> HubFolder:
    """Return the folder of a name in SAELens' table, which is read without importing SAELens."""
    spec = importlib.util.find_spec("sae_lens")
    if spec is None or not spec.submodule_search_locations:
        raise _invalid_source(
            f"Names of releases, such as {clip(source)!r}, are looked up in SAELens' table, and this server "
            "has no SAELens: `pip install --no-deps sae-lens` beside it, or name repository and folder, "
            "hf://OWNER/NAME/FOLDER."
        )
    releases = _read_release_table(Path(spec.submodule_search_locations[0], _TABLE))
    if table == "saelens":
        candidates = [
            (release_or_model, sae)
            for sae in releases.get(release_or_model, {}).get("saes", ())
            if sae.get("id") == sae_name
        ]
    else:
        candidates = [
            (name, sae)
            for name, release in releases.items()
            for sae in release.get("saes", ())
            if sae.get("neuronpedia") == f"{release_or_model}/{sae_name}"
        ]
    if not candidates:
        raise _invalid_source(f"SAELens' table of releases has no {clip(source)!r}.")
    name, sae = candidates[0]
    release = releases[name]
    if release.get("conversion_func"):
        raise ApiError(
            ErrorCode.UNSUPPORTED_DICTIONARY,
            f"The release {name} has a layout of its own ({clip(str(release['conversion_func']))}). Convert "
            f"it with SAELens, SAE.from_pretrained({name!r}, {sae['id']!r}).save_model(FOLDER), and add the "
            "folder.",
            _PARAM,
        )
    overrides = dict(release.get("config_overrides") or {})
    if sae.get(_FACTOR) is not None:
        overrides[_FACTOR] = sae[_FACTOR]
    return HubFolder(release["repo_id"], str(sae["path"]).strip("/"), overrides=overrides)


@functools.lru_cache(maxsize=1)
def _read_release_table(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as file:
        # The installed package's own file; parsed in C, since it has megabytes. Both loaders are safe.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        table: dict[str, Any] = yaml.load(file, Loader=loader)  # noqa: S506 # nosec B506
    return table


def _too_large(name: str, max_bytes: int) -> ApiError:
    return ApiError(
        ErrorCode.BODY_TOO_LARGE, f"{name} of a dictionary has at most {max_bytes} bytes.", _PARAM
    )


def _invalid_source(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_VALUE, message, _PARAM)


def _unavailable(reason: str) -> ApiError:
    return ApiError(ErrorCode.HUB_UNAVAILABLE, f"The Hub could not be read: {reason}.", _PARAM)
