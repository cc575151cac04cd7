"""The dictionaries of one server: uploads, downloads from the Hub, weights as files, labels of features."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy.orm import Session
from starlette.requests import Request

from api_schemas.dictionaries import (
    Dictionary,
    DictionaryFeature,
    DictionaryFromHub,
    DictionaryList,
    FeatureList,
)
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.fields import StoredName, Strict
from app.auth.principal import Principal
from app.catalog.catalog import Catalog, CatalogParts, check_changing, check_sharing
from app.catalog.dictionary_form import (
    CSV_TYPE,
    MAX_CFG_BYTES,
    MAX_LABELS_BYTES,
    is_json,
    labels_of_csv,
    labels_of_object,
    read_form,
)
from app.catalog.dictionary_points import points_of_dictionary, width_at
from app.catalog.hub import CFG_FILE, WEIGHTS_FILE, check_hub_allowed, folder_of, is_trusted, open_on_hub
from app.formats.json_bodies import MAX_JSON_DEPTH, check_depth, parse_object
from app.http.bodies import BodyLimits, check_media_type, read_bytes, read_object
from app.http.contexts import context_of, while_connected
from app.http.errors import validated
from app.limits.limit import Holder, Limit
from app.limits.slots import Slots
from app.storage import versions
from app.storage.database import Database, dictionary_folder
from app.storage.dictionary_files import DictionaryFiles, WeightsUpload
from app.storage.feature_labels import (
    Labels,
    add_labels,
    find_features,
    ids_of,
    labels_of,
    num_label_bytes,
    replace_labels,
)
from app.storage.open_files import OpenResult, in_pieces
from app.storage.tables import VersionRow
from app.storage.versions import Kind, NewVersion
from nnsight_engine.features.config import DictionaryConfig
from nnsight_engine.features.saelens import PARAM as CFG
from nnsight_engine.features.saelens import read_config
from nnsight_engine.features.weights_file import check_weights, refuse_pickle

logger = logging.getLogger(__name__)

LABELS: Final = "labels"
_CFG_FILE: Final = "The dictionary's cfg.json"
_SMALL_BYTES: Final = 128 * 1024
"""Larger JSON is parsed in a process of its own."""
_MAX_WORDS: Final = 16
_MAX_BODY_BYTES: Final = 16 * 1024
_CHECKS_AT_ONCE: Final = 2
"""Files that are read at once to check their numbers; others of the server's threads stay free."""


class _DictionaryForm(Strict):
    name: StoredName
    at: str | None = None
    output_at: str | None = None
    shared: Literal["true", "false"] = "false"


class FeatureLabels:
    """The labels of a dictionary's features, read as they are needed and remembered for one request."""

    def __init__(self, database: Database, row: VersionRow) -> None:
        self._database = database
        self._number = row.number
        self._num_labels = row.head["num_labels"]
        self._labels_by_id: dict[int, str | None] = {}
        self._ids: dict[str, list[int]] = {}

    async def of(self, ids: Sequence[int]) -> dict[int, str]:
        """Return the labels of those features that have one."""
        unread = [feature for feature in ids if feature not in self._labels_by_id] if self._num_labels else []
        if unread:
            labels = await self._database.read(lambda session: labels_of(session, self._number, unread))
            self._labels_by_id |= dict.fromkeys(unread) | labels
        return {feature: label for feature in ids if (label := self._labels_by_id.get(feature)) is not None}

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the bytes of the labels of some features, as far as they have been read."""
        return sum(len((self._labels_by_id.get(feature) or "").encode()) for feature in ids)

    async def ids_of(self, labels: Iterable[str], limit: int) -> dict[str, list[int]]:
        """Return the features that have exactly one of some labels, at most ``limit`` each, by label."""
        unread = [label for label in labels if label not in self._ids]
        if unread:
            self._ids |= await self._database.read(
                lambda session: ids_of(session, self._number, unread, limit)
            )
        return self._ids


class Dictionaries(Catalog[Dictionary, DictionaryConfig]):
    """Their content is the ``cfg.json`` as received; their weights are files, named by ``sha256``."""

    kind = Kind(
        "dictionary", "dictionaries", "dict_", Dictionary, DictionaryList,
        lambda budget: budget.dictionary_bytes, counted=("dictionary",),
    )  # fmt: skip

    def __init__(self, parts: CatalogParts) -> None:
        super().__init__(parts)
        self._files = DictionaryFiles(dictionary_folder(parts.settings), self._space)
        self._checking = asyncio.Semaphore(_CHECKS_AT_ONCE)
        # Each search reads all labels of a dictionary in a thread of the database, which others need too. An
        # index would not bound it: words of one or two letters, anywhere in a label, have none.
        self._searching = Slots(
            Limit("searches of labels", 2, each=1), Limit("waiting searches of labels", 256, 0.5)
        )
        self._downloading = Slots(
            Limit("downloads from the Hub", 2, each=1), Limit("waiting downloads from the Hub", 16, 0.25)
        )

    async def start(self) -> None:
        """Create the folder, count the stored bytes, and remove files that servers which died left behind."""
        await self._files.start()
        await self.count()
        hashes, aside = await self._files.old_files()
        for sha256 in hashes:
            await self._remove_unused(sha256)
        for path in aside:
            await self._remove_or_bring_back(path)

    async def close(self) -> None:
        await self._files.close()

    async def create(self, request: Request, caller: Principal, *, strict: bool = False) -> Dictionary:
        """Store the dictionary of a request, or nothing if it is invalid (ApiError).

        ``strict`` refuses one that names another model than the served one.
        """
        settings = self._settings
        limits = BodyLimits(settings.max_dictionary_bytes, settings.upload_idle_timeout_s)
        async with self._files.receiving(Holder(caller.tenant)) as upload:
            parts = await read_form(request, upload, limits)
            texts = {name: content for name, content in parts.items() if name not in {CFG, LABELS}}
            form = validated(
                _DictionaryForm, {name: content.decode("utf-8", "replace") for name, content in texts.items()}
            )
            check_sharing(caller, shared=form.shared == "true")
            cfg = parts.get(CFG)
            if cfg is None:
                raise ApiError(ErrorCode.BAD_REQUEST, "A dictionary's form needs its cfg.json as `cfg`.", CFG)
            labels: Labels = {}
            new = await self._checked_version(form, cfg, upload, strict=strict)
            if LABELS in parts:
                content, num_features = parts[LABELS], new.head["num_features"]
                is_csv = not is_json(content)
                labels = await self._parse_labels(request, content, num_features, LABELS, is_csv=is_csv)
            return await self._store_shielded(new, labels, upload, caller)

    async def create_from_hub(
        self, request: Request, caller: Principal, *, strict: bool = False
    ) -> Dictionary:
        """Download a dictionary and store it.

        Raises ApiError ``hub_not_allowed``, ``not_found``, ``hub_unavailable``, and as ``create``. A client's
        disconnect ends the download, and nothing is stored.
        """
        settings = self._settings
        limits = BodyLimits(_MAX_BODY_BYTES, settings.upload_idle_timeout_s)
        form = validated(DictionaryFromHub, await read_object(request, limits))
        check_sharing(caller, shared=form.shared)
        check_hub_allowed(settings, caller)
        work = self._download(form, caller, strict=strict)
        return await while_connected(request.receive, work, context_of(request.scope).deadline)

    async def add_first(
        self, name: str, weights: bytes, cfg: bytes, labels: Labels, caller: Principal
    ) -> Dictionary:
        """Store a shared dictionary; raises NameUsedError if it is not the first of its name."""
        check_sharing(caller, shared=True)
        async with self._files.receiving(Holder(caller.tenant)) as upload:
            upload.spending.add(len(weights))
            await asyncio.to_thread(upload.write, weights)
            await asyncio.to_thread(upload.finish)
            new = await self._checked_version(_DictionaryForm(name=name, shared="true"), cfg, upload)
            return await self._store_shielded(dataclasses.replace(new, is_first=True), labels, upload, caller)

    async def open(self, dictionary_id: str, tenant: str) -> tuple[Dictionary, OpenResult]:
        """Open the weights' file; raises ApiError, ``internal_error`` if it is gone."""
        dictionary = await self.get(dictionary_id, tenant)
        try:
            return dictionary, await self._files.open(
                dictionary.sha256, dictionary.weights_bytes, Holder(tenant)
            )
        except FileNotFoundError as error:
            await self.get(dictionary_id, tenant)  # it may have been removed meanwhile
            logger.exception("the weights of the dictionary %s are missing", dictionary_id)
            raise ApiError(
                ErrorCode.INTERNAL,
                "The weights of this dictionary are missing; servers that share a database need the same "
                "dictionary_dir. The server has logged it.",
            ) from error

    async def _forget(self, row: VersionRow) -> None:
        await self._remove_unused(row.sha256)

    async def set_labels(self, request: Request, dictionary_id: str, caller: Principal) -> Dictionary:
        """Replace the labels of a dictionary by those of a request's body; raises ApiError."""
        row = await self._visible(dictionary_id, caller.tenant)
        check_changing(row, caller)
        is_csv = request.headers.get("content-type", "").split(";", 1)[0].strip().lower() == CSV_TYPE
        if not is_csv:
            check_media_type(request, "application/json")
        idle_s = self._settings.upload_idle_timeout_s
        body = await read_bytes(request, min(MAX_LABELS_BYTES, self._settings.max_body_bytes), idle_s)
        labels = await self._parse_labels(request, bytes(body), row.head["num_features"], None, is_csv=is_csv)
        async with self._adding:
            with self._space.spend(Holder(caller.tenant), num_label_bytes(labels)):
                row = await self._write(self._replace_labels, dictionary_id, caller.tenant, labels)
            await self.count()
        return self._shown(row, caller.tenant)

    async def features(
        self, dictionary_id: str, tenant: str, *, query: str, feature: int | None, after: int, limit: int
    ) -> FeatureList:
        """Return features by id; ``query``'s words all occur in a label, without case; raises ApiError.

        ``feature`` is the one to return, with a label or without; None for all that have one.
        """
        words = query.split()
        if len(words) > _MAX_WORDS:
            raise ApiError(
                ErrorCode.INVALID_VALUE, f"A query has at most {_MAX_WORDS} words, got {len(words)}.", "query"
            )

        def read(session: Session) -> list[DictionaryFeature]:
            row = versions.visible(session, self.kind, dictionary_id, tenant)
            matching = find_features(
                session, row.number, words=words, feature=feature, after=after, limit=limit + 1
            )
            if matching or words or feature is None or not after < feature < row.head["num_features"]:
                return matching
            return [DictionaryFeature(id=feature)]

        async with self._searching.request(tenant) if words else contextlib.nullcontext():
            matching = await self._database.read(read)
        data = matching[:limit]
        return FeatureList(data=data, last_id=data[-1].id if data else None, has_more=len(matching) > limit)

    async def file_of(self, row: VersionRow) -> Path:
        """Return the file of the weights, after it was read into the machine's memory."""
        await self._files.read_ahead(row.sha256)
        return self._files.path(row.sha256)

    def labels_of(self, row: VersionRow) -> FeatureLabels:
        return FeatureLabels(self._database, row)

    async def _download(self, form: DictionaryFromHub, caller: Principal, *, strict: bool) -> Dictionary:
        """Store a dictionary from the Hub, whose weights go to disk as they arrive."""
        settings = self._settings
        open_file = functools.partial(open_on_hub, trusted=is_trusted(settings, caller))
        async with (
            self._downloading.request(caller.tenant),
            self._files.receiving(Holder(caller.tenant)) as upload,
        ):
            folder = await asyncio.to_thread(folder_of, form.source)
            async with open_file(folder, CFG_FILE, MAX_CFG_BYTES) as (folder, pieces):
                cfg = b"".join([piece async for piece in pieces])
            # The weights are of the same commit.
            async with open_file(folder, WEIGHTS_FILE, settings.max_dictionary_bytes) as (folder, pieces):
                async for piece in in_pieces(pieces):
                    if not upload.num_bytes:
                        refuse_pickle("", piece)
                    upload.spending.add(len(piece))
                    await asyncio.to_thread(upload.write, piece)
            await asyncio.to_thread(upload.finish)
            fields = _parse_json(cfg, CFG)
            cfg = json.dumps({**fields, **folder.overrides, "source": str(folder)}, indent=2).encode()
            new = await self._checked_version(form, cfg, upload, strict=strict)
            return await self._store_shielded(new, {}, upload, caller)

    async def _checked_version(
        self,
        form: _DictionaryForm | DictionaryFromHub,
        cfg: bytes,
        upload: WeightsUpload,
        *,
        strict: bool = False,
    ) -> NewVersion:
        """Return a dictionary to be stored, without labels, checked against its weights and the model."""
        sae_config = read_config(_parse_json(cfg, CFG))
        if strict:
            self._engine.served().warnings_of(sae_config.model, _CFG_FILE, ErrorCode.DICTIONARY_MISMATCH)
        at, output_at = points_of_dictionary(sae_config, form.at, form.output_at, self._engine.capabilities())
        async with self._checking:
            dtype = await asyncio.to_thread(check_weights, upload.path, sae_config.config)
        head = {
            "trained_on": sae_config.model or None,
            "architecture": sae_config.config.architecture.value,
            "at": at,
            "output_at": output_at,
            "input_width": sae_config.config.input_width,
            "output_width": sae_config.config.output_width,
            "num_features": sae_config.config.num_features,
            "dtype": dtype,
            "weights_bytes": upload.num_bytes,
        }
        return NewVersion(form.name, form.shared in {True, "true"}, head, cfg, upload.sha256)

    async def _parse_labels(
        self, request: Request, content: bytes, num_features: int, param: str | None, *, is_csv: bool
    ) -> Labels:
        """Return labels of CSV or JSON; ``param`` is the field that has them, None for the whole body."""
        if is_csv:
            return await asyncio.to_thread(labels_of_csv, content, num_features, param)
        context = context_of(request.scope)
        if context.bodies is not None and len(content) >= _SMALL_BYTES:
            value = await context.bodies.read(content, context.tenant)
        else:
            value = _parse_json(content, param)
        return await asyncio.to_thread(labels_of_object, value, content, num_features, param)

    async def _store_shielded(
        self, new: NewVersion, labels: Labels, upload: WeightsUpload, caller: Principal
    ) -> Dictionary:
        """Store a dictionary; a cancelled request waits until that has ended."""
        num_bytes = upload.num_bytes + len(new.data) + num_label_bytes(labels)
        head = {**new.head, "num_labels": len(labels)}
        new = dataclasses.replace(new, head=head, num_bytes=num_bytes)
        storing = asyncio.ensure_future(self._store(new, labels, upload, caller.tenant))
        try:
            return self._shown(await asyncio.shield(storing), caller.tenant)
        except asyncio.CancelledError:
            # The transaction cannot be cancelled, and it needs the file.
            await asyncio.gather(storing, return_exceptions=True)
            raise

    async def _store(self, new: NewVersion, labels: Labels, upload: WeightsUpload, tenant: str) -> VersionRow:
        """Add the weights to the folder, then the dictionary to the database; on failure neither stays."""

        def write(session: Session) -> VersionRow:
            row = self._insert(session, new, tenant)
            add_labels(session, row.number, labels)
            return row

        async with self._adding:  # or concurrent requests could each pass the check for the same free bytes
            await self._files.add(upload)
            try:
                row = await self._write(write)
            except BaseException:
                await self._remove_unused(new.sha256)
                raise
            # Another server may have removed the last other dictionary with these weights meanwhile.
            await self._files.add(upload)
            upload.spending.close()
            await self.count()
        return row

    def _replace_labels(
        self, session: Session, dictionary_id: str, tenant: str, labels: Labels
    ) -> VersionRow:
        """Replace a dictionary's labels in the session's transaction, if there is room for what they add."""
        visible_row = versions.visible(session, self.kind, dictionary_id, tenant)
        # Two requests that replace the labels at once do so one after the other.
        row = session.get_one(VersionRow, visible_row.number, with_for_update=True)
        num_bytes = row.head["weights_bytes"] + len(row.data) + num_label_bytes(labels)
        num_added = max(0, num_bytes - row.num_bytes)
        versions.check_room(session, self.kind, self._space, num_added, row.tenant)
        replace_labels(session, row.number, labels)
        row.num_bytes, row.head = num_bytes, {**row.head, "num_labels": len(labels)}
        return row

    def _parse(self, data: bytes) -> DictionaryConfig:
        return read_config(json.loads(data.decode("utf-8-sig"))).config

    def _check_fit(self, row: VersionRow, content: DictionaryConfig, param: str) -> None:
        at, output_at = row.head["at"], row.head["output_at"] or row.head["at"]
        for point, width in {at: content.input_width, output_at: content.output_width}.items():
            if width_at(point, self._engine.capabilities()) != width:
                why = f"is of values with {width} numbers, and this model has none such at {point}"
                raise self.mismatch(row, why, param)

    def _shown(self, row: VersionRow, tenant: str) -> Dictionary:
        """Return a dictionary with its warnings; one of a model that is not served now has none."""
        shown = super()._shown(row, tenant)
        if shown.model not in self.models:
            return shown
        warnings = self._engine.served().warnings_of(shown.trained_on or "", _CFG_FILE)
        return shown.model_copy(update={"warnings": warnings})

    async def _remove_unused(self, sha256: str) -> None:
        """Remove weights that no dictionary has; another one may come while they are set aside."""
        if not await self._read(versions.num_uses, sha256):
            aside = await self._files.set_aside(sha256)
            if aside is not None:
                await self._remove_or_bring_back(aside)

    async def _remove_or_bring_back(self, aside: Path) -> None:
        """Remove a file that was set aside; bring it back if a dictionary has come for it meanwhile."""
        if await self._read(versions.num_uses, aside.name.partition(".")[0]):
            await self._files.bring_back(aside)
        else:
            await self._files.remove(aside)


def _parse_json(content: bytes, param: str | None) -> dict[str, Any]:
    try:
        check_depth(content, MAX_JSON_DEPTH)
        return parse_object(content)
    except ApiError as error:
        raise ApiError(error.code, error.message, param) from error
