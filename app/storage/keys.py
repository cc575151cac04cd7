"""API keys in the database. Rows are never deleted, for the audit log."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api_schemas.administration import Key, Limits, NewKey, Scope, Tenant, Tier
from api_schemas.errors import ApiError, ErrorCode
from app.storage.database import Database
from app.storage.tables import KeyRow, TenantRow

_MAX_IDS: Final = 1000
"""The maximum number of ids in one statement, which databases limit."""


class KeyTakenError(Exception):
    pass


class KeyStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, new: NewKey, key_id: str, hash_: str) -> Key:
        """Insert a key with the hash ``hash_``, and its tenant if this is the tenant's first key.

        Raises KeyTakenError if the id is used.
        """

        def write(session: Session) -> Key:
            moment = time.time()
            if session.get(TenantRow, new.tenant) is None:
                session.add(TenantRow(name=new.tenant, limits={}, created_at=moment))
                session.flush()
            expires_at = None if new.expires_in_s is None else moment + new.expires_in_s
            row = KeyRow(
                id=key_id, tenant=new.tenant, name=new.name, hash=hash_, scopes=list(new.scopes),
                tier=new.tier, limits=_limits_json(new.limits), created_at=moment, expires_at=expires_at,
                trusted_codecs=new.trusted_codecs, presets=None if new.presets is None else list(new.presets),
            )  # fmt: skip
            session.add(row)
            return key_from_row(row)

        try:
            return await self._database.write(write)
        except IntegrityError:
            pass  # another server has just created the tenant, on a database with concurrent writers
        try:
            return await self._database.write(write)
        except IntegrityError as error:
            raise KeyTakenError(key_id) from error

    async def replace(self, key_id: str, new_id: str, hash_: str, grace_s: float) -> Key:
        """Insert a key with the rights of ``key_id``, which ends after ``grace_s`` seconds; ``key_ended``."""

        def write(session: Session) -> Key:
            moment = time.time()
            # Locked, so that two concurrent replacements, with and without a grace period, cannot extend the
            # old key.
            old = session.get(KeyRow, key_id, with_for_update=True)
            if old is None:
                raise not_found(key_id)
            if not is_open(old, moment):
                raise ApiError(
                    ErrorCode.KEY_ENDED, f"The key {key_id!r} has ended; create another.", "key_id"
                )
            row = KeyRow(
                id=new_id, tenant=old.tenant, name=old.name, hash=hash_, scopes=old.scopes, tier=old.tier,
                limits=old.limits, created_at=moment, expires_at=old.expires_at, replaces=old.id,
                trusted_codecs=old.trusted_codecs, presets=old.presets,
            )  # fmt: skip
            session.add(row)
            grace_end = moment + grace_s
            old.expires_at = grace_end if old.expires_at is None else min(grace_end, old.expires_at)
            return key_from_row(row)

        return await self._database.write(write)

    async def revoke(self, key_id: str) -> Key:
        """Revoke a key; one that is already revoked is unchanged."""

        def write(session: Session) -> Key:
            row = session.get(KeyRow, key_id, with_for_update=True)
            if row is None:
                raise not_found(key_id)
            if row.revoked_at is None:
                row.revoked_at = time.time()
            return key_from_row(row)

        return await self._database.write(write)

    async def page(self, tenant: str | None = None) -> list[Key]:
        def read(session: Session) -> list[Key]:
            query = select(KeyRow).order_by(KeyRow.created_at.desc(), KeyRow.id)
            if tenant is not None:
                query = query.where(KeyRow.tenant == tenant)
            return [key_from_row(row) for row in session.scalars(query)]

        return await self._database.read(read)

    async def has_open(self, tier: Tier, scope: Scope) -> bool:
        """Return whether there is a valid key with this tier and scope."""

        def read(session: Session) -> bool:
            moment = time.time()
            rows = session.scalars(
                select(KeyRow).where(KeyRow.tier == tier.value, KeyRow.revoked_at.is_(None))
            )
            return any(is_open(row, moment) and scope in key_from_row(row).scopes for row in rows)

        return await self._database.read(read)

    async def find(self, key_ids: Collection[str]) -> dict[str, tuple[KeyRow, Limits]]:
        """Return keys by id, ended ones too, each with its tenant's limits; without unknown ids."""

        def read(session: Session) -> dict[str, tuple[KeyRow, Limits]]:
            # One statement, whether or not the key exists, so that the time it takes reveals nothing.
            joined = select(KeyRow, TenantRow.limits).join(TenantRow, TenantRow.name == KeyRow.tenant)
            rows_by_id: dict[str, tuple[KeyRow, Limits]] = {}
            ids = list(key_ids)
            for start in range(0, len(ids), _MAX_IDS):
                chunk = joined.where(KeyRow.id.in_(ids[start : start + _MAX_IDS]))
                for row, limits in session.execute(chunk):
                    rows_by_id[row.id] = row, Limits.model_validate(limits)
            return rows_by_id

        return await self._database.read(read)

    async def valid_successor(self, key_id: str) -> tuple[KeyRow, Limits] | None:
        """Return a key or, if it expired, its newest valid successor; none of revoked ones."""

        def read(session: Session) -> tuple[KeyRow, Limits] | None:
            moment = time.time()
            row = session.get(KeyRow, key_id)
            pending = [] if row is None else [row]
            while pending:
                row = pending.pop()
                if row.revoked_at is not None:
                    continue
                if is_open(row, moment):
                    return row, Limits.model_validate(session.get_one(TenantRow, row.tenant).limits)
                # A key may have been replaced more than once, for example if the first response was lost.
                successors = select(KeyRow).where(KeyRow.replaces == row.id).order_by(KeyRow.created_at)
                pending.extend(session.scalars(successors))
            return None

        return await self._database.read(read)

    async def tenants(self) -> list[Tenant]:
        def read(session: Session) -> list[Tenant]:
            return [_tenant(row) for row in session.scalars(select(TenantRow).order_by(TenantRow.name))]

        return await self._database.read(read)

    async def limit(self, tenant: str, limits: Limits) -> Tenant:
        """Set the limits of a tenant; ``tenant_not_found``."""

        def write(session: Session) -> Tenant:
            row = session.get(TenantRow, tenant)
            if row is None:
                raise ApiError(ErrorCode.TENANT_NOT_FOUND, f"There is no tenant {tenant!r}.", "tenant")
            row.limits = _limits_json(limits)
            return _tenant(row)

        return await self._database.write(write)

    async def is_used(self) -> bool:
        """Return whether a key was ever created; from then on every caller needs a key."""
        count = await self._database.read(lambda session: session.scalar(select(func.count(KeyRow.id))))
        return bool(count)

    async def note_use(self, key_id: str) -> None:
        change = update(KeyRow).where(KeyRow.id == key_id).values(last_used_at=time.time())
        await self._database.write(lambda session: session.execute(change))


def is_open(row: KeyRow, moment: float) -> bool:
    """Return whether a key is valid at a moment (seconds since 1970)."""
    return row.revoked_at is None and (row.expires_at is None or moment < row.expires_at)


def key_from_row(row: KeyRow) -> Key:
    return Key(
        id=row.id,
        tenant=row.tenant,
        name=row.name,
        scopes=tuple(row.scopes),
        tier=row.tier,
        limits=Limits.model_validate(row.limits),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        replaces=row.replaces,
        trusted_codecs=row.trusted_codecs,
        presets=None if row.presets is None else tuple(row.presets),
    )


def _tenant(row: TenantRow) -> Tenant:
    return Tenant(name=row.name, limits=Limits.model_validate(row.limits), created_at=row.created_at)


def _limits_json(limits: Limits) -> dict[str, Any]:
    return limits.model_dump(exclude_none=True)


def not_found(key_id: str) -> ApiError:
    return ApiError(ErrorCode.KEY_NOT_FOUND, f"There is no key {key_id!r}.", "key_id")
