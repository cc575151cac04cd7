from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, Final, Literal

from starlette.requests import Request

from api_schemas.dictionaries import Dictionary, DictionaryFromHub, DictionaryList, FeatureList
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.fields import StoredName, Strict
from app.admission.slot_pool import SlotPool
from app.auth.principal import Principal
from app.dictionaries.form import (
    CSV_TYPE,
    MAX_CFG_BYTES,
    MAX_LABELS_BYTES,
    is_json,
    labels_of_csv,
    labels_of_object,
    read_form,
)
from app.dictionaries.hub import CFG_FILE, WEIGHTS_FILE, Hub, check_hub_allowed, folder_of, is_trusted
from app.dictionaries.names import DictionaryResolver, places_of
from app.engine.client import EngineClient
from app.formats.json_bodies import check_depth, parse_object
from app.http.bodies import BodyLimits, check_media_type, read_bytes, read_object
from app.http.contexts import context_of
from app.http.deadlines import while_connected
from app.http.errors import validated
from app.limits.allowances import Allowance
from app.limits.tenant_budget import TenantBudget
from app.settings import Settings
from app.storage.database import Database, dictionary_folder
from app.storage.dictionaries import DictionaryStore, Labels, NewDictionary, num_label_bytes
from app.storage.dictionary_files import DictionaryFiles, WeightsUpload
from app.storage.open_files import OpenResult, in_pieces
from app.storage.quotas import DiskQuota, Holder, StoredBytes
from app.versions import check_changing, check_sharing
from nnsight_engine.features.saelens import PARAM as CFG
from nnsight_engine.features.saelens import read_config
from nnsight_engine.features.weights_file import check_weights, refuse_pickle

logger = logging.getLogger(__name__)

LABELS: Final = "labels"
_CFG_FILE: Final = "The dictionary's cfg.json"
_SMALL_BYTES: Final = 128 * 1024
"""Larger JSON is parsed in a process of its own."""
_MAX_WORDS: Final = 16
_SEARCHES: Final = Allowance("searches of labels", total=2, each=1)
"""Searches at once. Each reads all labels of a dictionary in a thread of the database, which others need too.

An index would not bound them: words of one or two letters, anywhere in a label, have none.
"""
_WAITING: Final = Allowance.of("waiting searches of labels", 256, 0.5)
_DOWNLOADS: Final = Allowance("downloads from the Hub", total=2, each=1)
_WAITING_DOWNLOADS: Final = Allowance.of("waiting downloads from the Hub", 16, 0.25)
_MAX_BODY_BYTES: Final = 16 * 1024
_CHECKS_AT_ONCE: Final = 2
"""Files that are read at once to check their numbers; others of the server's threads stay free."""


class _Form(Strict):
    name: StoredName
    at: str | None = None
    output_at: str | None = None
    shared: Literal["true", "false"] = "false"


class DictionaryService:
    def __init__(
        self, settings: Settings, database: Database, engine: EngineClient, stored: StoredBytes
    ) -> None:
        allowance = TenantBudget.of(settings).dictionary_bytes
        self._settings = settings
        self._store = DictionaryStore(database, allowance)
        self._space = DiskQuota(allowance, stored)
        self._files = DictionaryFiles(dictionary_folder(settings), self._space)
        self._adding = asyncio.Lock()
        self._checking = asyncio.Semaphore(_CHECKS_AT_ONCE)
        self._searching = SlotPool(_SEARCHES, _WAITING)
        self._downloading = SlotPool(_DOWNLOADS, _WAITING_DOWNLOADS)
        self._engine = engine

    @property
    def used_bytes(self) -> int:
        return self._space.used_bytes

    async def start(self) -> None:
        """Create the folder, count the stored bytes, and remove files that servers which died left behind."""
        await self._files.start()
        await self.count()
        hashes, aside = await self._files.old_files()
        for sha256 in hashes:
            await self._remove_unused(sha256)
        for path in aside:
            await self._settle(path)

    async def close(self) -> None:
        await self._files.close()

    async def count(self) -> None:
        """Update the stored bytes of each tenant from the database, where other servers write too."""
        self._space.set_stored(await self._store.used_bytes())

    async def create(self, request: Request, caller: Principal, *, strict: bool = False) -> Dictionary:
        """Store the dictionary of a request, or nothing if it is invalid (ApiError).

        ``strict`` refuses one that names another model than the served one.
        """
        settings = self._settings
        limits = BodyLimits(
            settings.max_dictionary_bytes, settings.max_json_depth, settings.upload_idle_timeout_s
        )
        async with self._files.receiving(Holder(caller.tenant)) as upload:
            parts = await read_form(request, upload, limits)
            texts = {name: part for name, part in parts.items() if name not in {CFG, LABELS}}
            form = validated(_Form, {name: part.decode("utf-8", "replace") for name, part in texts.items()})
            check_sharing(caller, shared=form.shared == "true")
            cfg = parts.get(CFG)
            if cfg is None:
                raise ApiError(ErrorCode.BAD_REQUEST, "A dictionary's form needs its cfg.json as `cfg`.", CFG)
            new = await self._checked(form, cfg, upload, caller.tenant, strict=strict)
            if LABELS in parts:
                content, num_features = parts[LABELS], new.config.num_features
                is_csv = not is_json(content)
                labels = await self._labels(request, content, num_features, LABELS, is_csv=is_csv)
                new = dataclasses.replace(new, labels=labels)
            return await self._kept(new, upload)

    async def create_from_hub(
        self, request: Request, caller: Principal, *, strict: bool = False
    ) -> Dictionary:
        """Raise ApiError ``hub_not_allowed``, ``not_found``, ``hub_unavailable``, and as ``create``.

        A client's disconnect ends the download, and nothing is stored.
        """
        settings = self._settings
        limits = BodyLimits(_MAX_BODY_BYTES, settings.max_json_depth, settings.upload_idle_timeout_s)
        wanted = validated(DictionaryFromHub, await read_object(request, limits))
        check_sharing(caller, shared=wanted.shared)
        check_hub_allowed(settings, caller)
        work = self._downloaded(wanted, caller, strict=strict)
        return await while_connected(request.receive, work, context_of(request.scope).deadline)

    async def add_first(
        self, name: str, weights: bytes, cfg: bytes, labels: Labels, caller: Principal
    ) -> Dictionary:
        """Store a shared dictionary; raises NameUsedError if it is not the first of its name."""
        check_sharing(caller, shared=True)
        async with self._files.receiving(Holder(caller.tenant)) as upload:
            upload.reserve(len(weights))
            await asyncio.to_thread(upload.write, weights)
            await asyncio.to_thread(upload.finish)
            new = await self._checked(_Form(name=name, shared="true"), cfg, upload, caller.tenant)
            return await self._kept(dataclasses.replace(new, labels=labels, is_first=True), upload)

    async def page(self, tenant: str, *, name: str | None, after: str | None, limit: int) -> DictionaryList:
        """Include shared dictionaries; raises ApiError ``dictionary_not_found``."""
        data, has_more = await self._store.page(tenant, name=name, after=after, limit=limit)
        return DictionaryList.of([self._shown(one) for one in data], has_more=has_more)

    async def get(self, dictionary_id: str, tenant: str) -> Dictionary:
        """Return a dictionary that is visible to a tenant; raises ApiError ``dictionary_not_found``."""
        return self._shown(await self._store.get(dictionary_id, tenant))

    async def cfg(self, dictionary_id: str, tenant: str) -> bytes:
        """Return a dictionary's ``cfg.json``; raises ApiError ``dictionary_not_found``."""
        return (await self._store.content(dictionary_id, tenant))[1]

    async def open(self, dictionary_id: str, tenant: str) -> tuple[Dictionary, OpenResult]:
        """Open the weights' file; raises ApiError, ``internal_error`` if it is gone."""
        about = await self.get(dictionary_id, tenant)
        try:
            return about, await self._files.open(about.sha256, about.weights_bytes, Holder(tenant))
        except FileNotFoundError as error:
            await self.get(dictionary_id, tenant)  # it may have been removed meanwhile
            logger.exception("the weights of the dictionary %s are missing", dictionary_id)
            raise ApiError(
                ErrorCode.INTERNAL,
                "The weights of this dictionary are missing; servers that share a database need the same "
                "dictionary_dir. The server has logged it.",
            ) from error

    async def remove(self, dictionary_id: str, caller: Principal) -> None:
        """Raise ApiError ``dictionary_not_found``; ``missing_scope``: a shared one needs ``admin``."""
        about = await self._changeable(dictionary_id, caller)
        await self._store.remove(dictionary_id, caller.tenant)
        await self._remove_unused(about.sha256)
        await self.count()

    async def set_labels(self, request: Request, dictionary_id: str, caller: Principal) -> Dictionary:
        """Replace the labels of a dictionary by those of a request's body; raises ApiError."""
        about = await self._changeable(dictionary_id, caller)
        is_csv = request.headers.get("content-type", "").split(";", 1)[0].strip().lower() == CSV_TYPE
        if not is_csv:
            check_media_type(request, "application/json")
        idle_s = self._settings.upload_idle_timeout_s
        body = await read_bytes(request, min(MAX_LABELS_BYTES, self._settings.max_body_bytes), idle_s)
        labels = await self._labels(request, bytes(body), about.num_features, None, is_csv=is_csv)
        holder, num_bytes = Holder(caller.tenant), num_label_bytes(labels)
        async with self._adding:
            self._space.take(num_bytes, holder)
            try:
                changed = await self._store.set_labels(dictionary_id, caller.tenant, labels)
            finally:
                self._space.give_up(num_bytes, holder)
            await self.count()
        return self._shown(changed)

    async def features(
        self, dictionary_id: str, tenant: str, *, query: str, feature: int | None, after: int, limit: int
    ) -> FeatureList:
        """See ``DictionaryStore.features``; raises ApiError, ``invalid_value`` for too many words."""
        words = query.split()
        if len(words) > _MAX_WORDS:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"A query has at most {_MAX_WORDS} words, got {len(words)}.", "query"
            )
        async with self._searching.request(tenant, object()) if words else contextlib.nullcontext():
            data, has_more = await self._store.features(
                dictionary_id, tenant, words=words, feature=feature, after=after, limit=limit
            )
        return FeatureList(data=data, last_id=data[-1].id if data else None, has_more=has_more)

    def resolver(self, tenant: str) -> DictionaryResolver:
        engine = self._engine
        return DictionaryResolver(
            self._store, self._files, engine.capabilities(), engine.served().names, tenant
        )

    async def _downloaded(self, wanted: DictionaryFromHub, caller: Principal, *, strict: bool) -> Dictionary:
        settings = self._settings
        hub = Hub(trusted=is_trusted(settings, caller))
        async with (
            self._downloading.request(caller.tenant, object()),
            self._files.receiving(Holder(caller.tenant)) as upload,
        ):
            folder = await asyncio.to_thread(folder_of, wanted.source)
            async with hub.open(folder, CFG_FILE, MAX_CFG_BYTES) as (folder, pieces):
                cfg = b"".join([piece async for piece in pieces])
            # The weights are of the same commit.
            async with hub.open(folder, WEIGHTS_FILE, settings.max_dictionary_bytes) as (folder, pieces):
                async for piece in in_pieces(pieces):
                    if not upload.num_bytes:
                        refuse_pickle("", piece)
                    upload.reserve(len(piece))
                    await asyncio.to_thread(upload.write, piece)
            await asyncio.to_thread(upload.finish)
            fields = _parsed(cfg, settings.max_json_depth, CFG)
            cfg = json.dumps({**fields, **folder.overrides, "source": str(folder)}, indent=2).encode()
            form = _Form(
                name=wanted.name,
                at=wanted.at,
                output_at=wanted.output_at,
                shared="true" if wanted.shared else "false",
            )
            new = await self._checked(form, cfg, upload, caller.tenant, strict=strict)
            return await self._kept(new, upload)

    async def _checked(
        self, form: _Form, cfg: bytes, upload: WeightsUpload, tenant: str, *, strict: bool = False
    ) -> NewDictionary:
        read = read_config(_parsed(cfg, self._settings.max_json_depth, CFG))
        if strict:
            self._engine.served().warnings_of(read.model, _CFG_FILE, ErrorCode.DICTIONARY_MISMATCH)
        at, output_at = places_of(read, form.at, form.output_at, self._engine.capabilities())
        async with self._checking:
            dtype = await asyncio.to_thread(check_weights, upload.path, read.config)
        return NewDictionary(
            tenant,
            form.name,
            self._engine.served().names[0],
            form.shared == "true",
            read.config,
            cfg,
            at,
            output_at,
            dtype,
            upload.sha256,
            upload.num_bytes,
            {},
        )

    async def _labels(
        self, request: Request, content: bytes, num_features: int, param: str | None, *, is_csv: bool
    ) -> Labels:
        if is_csv:
            return await asyncio.to_thread(labels_of_csv, content, num_features, param)
        context = context_of(request.scope)
        if context.bodies is not None and len(content) >= _SMALL_BYTES:
            value = await context.bodies.read(content, context.tenant)
        else:
            value = _parsed(content, self._settings.max_json_depth, param)
        return await asyncio.to_thread(labels_of_object, value, content, num_features, param)

    async def _kept(self, new: NewDictionary, upload: WeightsUpload) -> Dictionary:
        keeping = asyncio.ensure_future(self._keep(new, upload))
        try:
            return await asyncio.shield(keeping)
        except asyncio.CancelledError:
            # The transaction cannot be cancelled, and it needs the file.
            await asyncio.gather(keeping, return_exceptions=True)
            raise

    async def _keep(self, new: NewDictionary, upload: WeightsUpload) -> Dictionary:
        async with self._adding:  # or concurrent requests could each pass the check for the same free bytes
            await self._files.add(upload)
            try:
                kept = await self._store.add(new)
            except BaseException:
                await self._remove_unused(new.sha256)
                raise
            # Another server may have removed the last other dictionary with these weights meanwhile.
            await self._files.add(upload)
            upload.release()
            await self.count()
        return self._shown(kept)

    def _shown(self, about: Dictionary) -> Dictionary:
        """Return a dictionary with its warnings; one of a model that is not served now has none."""
        served = self._engine.served()
        if about.model not in served.names:
            return about
        return about.model_copy(update={"warnings": served.warnings_of(about.trained_on or "", _CFG_FILE)})

    async def _changeable(self, dictionary_id: str, caller: Principal) -> Dictionary:
        about = await self.get(dictionary_id, caller.tenant)
        check_changing(caller, shared=about.shared, own=about.own)
        return about

    async def _remove_unused(self, sha256: str) -> None:
        if not await self._store.num_uses(sha256):
            aside = await self._files.set_aside(sha256)
            if aside is not None:
                await self._settle(aside)

    async def _settle(self, aside: Path) -> None:
        """Remove a file that was set aside; bring it back if a dictionary has come for it meanwhile."""
        if await self._store.num_uses(aside.name.partition(".")[0]):
            await self._files.bring_back(aside)
        else:
            await self._files.remove(aside)


def _parsed(content: bytes, max_depth: int, param: str | None) -> dict[str, Any]:
    try:
        check_depth(content, max_depth)
        return parse_object(content)
    except ApiError as error:
        raise ApiError(error.code, error.message, param) from error
