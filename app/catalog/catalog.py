"""What every kind of named things has: versions, sharing between tenants, room, lists, contents, removal.

A kind is a subclass with its ``Kind``, the way in of its uploads, and what else it alone has.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from starlette.requests import Request

from api_schemas.administration import Scope
from api_schemas.errors import ApiError, clip
from api_schemas.fields import Listed, NameOrText, Page
from app.auth.principal import Principal
from app.engine.client import EngineClient
from app.formats.uploads import FORM_TYPE, read_form
from app.http.bodies import BodyLimits, check_media_type, read_bytes, read_object
from app.http.errors import validated
from app.limits.limit import Holder
from app.limits.tenant_budget import TenantBudget
from app.settings import Settings
from app.storage import versions
from app.storage.database import Database
from app.storage.quotas import StoredBytes, StoredQuotas
from app.storage.tables import VersionRow
from app.storage.versions import Kind, NewVersion

T = TypeVar("T", bound=Listed)
ContentT = TypeVar("ContentT")
FormT = TypeVar("FormT", bound=BaseModel)
ResultT = TypeVar("ResultT")


def check_sharing(caller: Principal, *, shared: bool) -> None:
    """Raise ApiError if a caller without the scope ``admin`` wants to share something."""
    if shared:
        caller.check(Scope.ADMIN)


def check_changing(row: VersionRow, caller: Principal) -> None:
    """Raise ApiError if a caller may not change or delete a version that it sees.

    A shared one requires ``admin``. Without keys nobody has that: there the caller may delete its own, which
    are the examples that the server has stored.
    """
    if row.shared and (caller.has_key or row.tenant != caller.tenant):
        caller.check(Scope.ADMIN)


class ContentCache:
    """An LRU cache of contents by the number of their version."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: collections.OrderedDict[int, tuple[Any, int]] = collections.OrderedDict()

    async def get(
        self, number: int, read: Callable[[int], Awaitable[tuple[ContentT, int] | None]]
    ) -> ContentT | None:
        """Return a content, or None if its version was deleted; ``read`` also returns its size in bytes."""
        entry = self._entries.get(number)
        if entry is not None:
            self._entries.move_to_end(number)
            content: ContentT
            content, _ = entry
            return content
        loaded = await read(number)
        if loaded is None:
            return None
        content, num_bytes = loaded
        if number not in self._entries and num_bytes <= self._max_bytes:
            self._entries[number] = loaded
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, num_dropped) = self._entries.popitem(last=False)
                self._num_bytes -= num_dropped
        return content


class CatalogParts(NamedTuple):
    """What the catalogs of one server share."""

    settings: Settings
    database: Database
    engine: EngineClient
    quotas: StoredQuotas
    cache: ContentCache


class Catalog(Generic[T, ContentT]):
    """The things of one kind; ``ContentT`` is what a stored content is used as."""

    kind: Kind[T]

    def __init__(self, parts: CatalogParts) -> None:
        self._settings, self._database, self._engine, quotas, self._cache = parts
        self._space = StoredBytes(self.kind.limit(TenantBudget.of(self._settings)), quotas)
        self._adding = asyncio.Lock()

    @property
    def used_bytes(self) -> int:
        return self._space.used()

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the served model; new versions are of the first."""
        return self._engine.served().names

    @property
    def body_limits(self) -> BodyLimits:
        settings = self._settings
        return BodyLimits(settings.max_body_bytes, settings.upload_idle_timeout_s)

    async def count(self) -> None:
        """Update the stored bytes of each tenant from the database, where other servers write too."""
        self._space.set_stored(await self._read(versions.used_bytes))

    async def add(self, new: NewVersion, caller: Principal) -> T:
        """Store the next version of a name.

        Raises:
            ApiError: ``missing_scope``, ``stored_bytes_full``, or that the store is full or the name taken.
            NameUsedError: It must be the first of its name, and is not.
        """
        return self._shown(await self._add(new, caller), caller.tenant)

    async def page(self, tenant: str, *, name: str | None, after: str | None, limit: int) -> Page[T]:
        """Return a tenant's versions and shared ones, newest first; ``not_found`` for ``after``."""
        rows = await self._read(versions.page, tenant, name=name, after=after, limit=limit + 1)
        # Some have hundreds of numbers to validate.
        data = await asyncio.to_thread(lambda: [self._shown(row, tenant) for row in rows[:limit]])
        return self.kind.listed.of(data, has_more=len(rows) > limit)

    async def get(self, id_: str, tenant: str) -> T:
        """Return a version visible to a tenant; ``not_found``."""
        return self._shown(await self._visible(id_, tenant), tenant)

    async def content(self, id_: str, tenant: str) -> bytes:
        """Return the file of a version visible to a tenant; ``not_found``."""
        row = await self._visible(id_, tenant, with_data=True)
        return self._file(self._shown(row, tenant), bytes(row.data))

    async def remove(self, id_: str, caller: Principal) -> VersionRow:
        """Return what was removed; ``not_found``, or ``missing_scope``: a shared one needs ``admin``."""
        row = await self._visible(id_, caller.tenant)
        check_changing(row, caller)
        await self._database.write(
            lambda session: session.delete(versions.visible(session, self.kind, row.id, caller.tenant))
        )
        await self._forget(row)
        await self.count()
        return row

    async def named(self, reference: NameOrText, tenant: str, param: str) -> tuple[VersionRow, ContentT]:
        """Return what a name in a request means; raises ApiError ``unknown_…`` or ``…_mismatch``."""
        kind, models = self.kind, self.models
        row = await self._read(versions.named, reference.name, reference.id, tenant, models)
        content = None if row is None else await self._cache.get(row.number, self._load)
        if row is None or content is None:
            name = repr(clip(reference.name)) + (
                "" if reference.id is None else f" with the id {clip(reference.id)!r}"
            )
            raise kind.error(
                "unknown_{}",
                f"There is no {kind.name} {name}; GET /v1/{kind.plural} lists them, "
                f"POST /v1/{kind.plural} makes one.",
                param,
            )
        if row.model not in models:
            raise self.mismatch(row, self._of_other_model(row), param)
        self._check_fit(row, content, param)
        return row, content

    def mismatch(self, row: VersionRow, why: str, param: str) -> ApiError:
        return self.kind.error("{}_mismatch", f"The {self.kind.name} {row.name}@{row.version} {why}.", param)

    async def data(self, number: int) -> bytes | None:
        return await self._database.read(lambda session: versions.data(session, number))

    async def _visible(self, id_: str, tenant: str, *, with_data: bool = False) -> VersionRow:
        return await self._read(versions.visible, id_, tenant, with_data=with_data)

    async def _forget(self, row: VersionRow) -> None:
        """Remove what a removed version has outside of the database."""

    def _shown(self, row: VersionRow, tenant: str) -> T:
        return self.kind.show(row, tenant)

    def _file(self, shown: T, data: bytes) -> bytes:
        """Return the file that is sent for a stored content."""
        del shown
        return data

    def _parse(self, data: bytes) -> ContentT:
        """Return a stored content as it is used, in a thread."""
        raise NotImplementedError

    def _check_fit(self, row: VersionRow, content: ContentT, param: str) -> None:
        """Raise ``mismatch`` if a version of the served model does not fit it as it is now."""

    def _of_other_model(self, row: VersionRow) -> str:
        return f"is of the model {clip(row.model)!r}, and this server has {self.models[0]!r}"

    async def _load(self, number: int) -> tuple[ContentT, int] | None:
        data = await self.data(number)
        return None if data is None else (await asyncio.to_thread(self._parse, data), len(data))

    async def _add(self, new: NewVersion, caller: Principal) -> VersionRow:
        check_sharing(caller, shared=new.shared)
        if not new.sha256:  # not in the transaction, which keeps other writers waiting
            digest = await asyncio.to_thread(hashlib.sha256, new.data)
            new = dataclasses.replace(new, sha256=digest.hexdigest())
        async with self._adding:  # or concurrent requests could each pass the check for the same free bytes
            await self.count()
            self._space.quotas.check(Holder(caller.tenant), versions.num_bytes_of(self.kind, new))
            row = await self._write(self._insert, new, caller.tenant)
            await self.count()
        return row

    def _insert(self, session: Session, new: NewVersion, tenant: str) -> VersionRow:
        versions.check_room(session, self.kind, self._space, versions.num_bytes_of(self.kind, new), tenant)
        return versions.add(session, self.kind, new, tenant, self.models[0])

    async def _upload(
        self,
        request: Request,
        form_type: type[FormT],
        from_form: Callable[[FormT, str, bytes], ResultT],
        from_json: Callable[[dict[str, Any]], ResultT],
        *,
        form_bytes: int,
        json_bytes: int,
    ) -> ResultT:
        """Read a body in a thread: a form, with the name and the content of its file, or JSON.

        Raises ApiError for an invalid body, ClientDisconnect if the client left before its end.
        """
        limits, content_type = self.body_limits, request.headers.get("content-type", "")
        if content_type.split(";", maxsplit=1)[0].strip().lower() != FORM_TYPE:
            check_media_type(request, "application/json")
            limits = dataclasses.replace(limits, max_bytes=min(json_bytes, limits.max_bytes))
            return await asyncio.to_thread(from_json, await read_object(request, limits))
        body = bytes(await read_bytes(request, min(form_bytes, limits.max_bytes), limits.idle_s))

        def read() -> ResultT:
            purpose = f"a {self.kind.name}"
            fields, (name, content) = read_form(body, content_type, form_type.model_fields, purpose)
            return from_form(validated(form_type, fields), name, content)

        return await asyncio.to_thread(read)

    async def _read(self, work: Callable[..., ResultT], *arguments: Any, **options: Any) -> ResultT:
        """Run a function of ``storage.versions`` for this kind."""
        return await self._database.read(lambda session: work(session, self.kind, *arguments, **options))

    async def _write(self, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Run ``work`` in a transaction; once more if a name was created meanwhile by a concurrent writer."""
        try:
            return await self._database.write(lambda session: work(session, *arguments))
        except IntegrityError:
            return await self._database.write(lambda session: work(session, *arguments))
