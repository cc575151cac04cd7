"""Keys in the database: made, found, replaced, ended; never removed, so that what they did stays told."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Key, Limits, NewKey, Scope, Tenant, Tier
from app.storage.database import Database
from app.storage.tables import KeyRow, TenantRow

_MAX_IDS: Final = 1000
"""Of one statement, which databases bound."""


class KeyTakenError(Exception):
    """The id of a key that was to be made is another's."""


class KeyStore:
    """Keys and their tenants.

    Args:
        database: Has the tables, and is started before this is used.
    """

    def __init__(self, database: Database) -> None:
        """Keep the database."""
        self._database = database

    async def add(self, new: NewKey, key_id: str, kept: str) -> Key:
        """Write a key down, and its tenant if it is the first.

        Args:
            new: What it may.
            key_id: Its name.
            kept: Its hash.

        Raises:
            KeyTakenError: There is one of this name.
        """

        def write(session: Session) -> Key:
            moment = time.time()
            if session.get(TenantRow, new.tenant) is None:
                session.add(TenantRow(name=new.tenant, limits={}, created_at=moment))
                session.flush()
            expires_at = None if new.expires_in_s is None else moment + new.expires_in_s
            row = KeyRow(
                id=key_id, tenant=new.tenant, name=new.name, hash=kept, scopes=list(new.scopes),
                tier=new.tier, limits=_kept(new.limits), created_at=moment, expires_at=expires_at,
                trusted_codecs=new.trusted_codecs,
            )  # fmt: skip
            session.add(row)
            return told(row)

        try:
            return await self._database.write(write)
        except IntegrityError:
            pass  # somebody else has just made the tenant, on databases that let two write at once
        try:
            return await self._database.write(write)
        except IntegrityError as error:
            raise KeyTakenError(key_id) from error

    async def replace(self, key_id: str, new_id: str, kept: str, grace_s: float) -> Key:
        """Write down a key of the rights of another, which ends after the grace.

        Raises:
            ApiError: ``key_not_found``; ``key_ended``: it opens nothing any more.
        """

        def write(session: Session) -> Key:
            moment = time.time()
            # Two that replace it at once, with and without a grace, must not lengthen it between them.
            old = session.get(KeyRow, key_id, with_for_update=True)
            if old is None:
                raise not_found(key_id)
            if not is_open(old, moment):
                raise ApiError(
                    ErrorCode.KEY_ENDED, f"The key {key_id!r} has ended; create another.", "key_id"
                )
            row = KeyRow(
                id=new_id, tenant=old.tenant, name=old.name, hash=kept, scopes=old.scopes, tier=old.tier,
                limits=old.limits, created_at=moment, expires_at=old.expires_at, replaces=old.id,
                trusted_codecs=old.trusted_codecs,
            )  # fmt: skip
            session.add(row)
            end = moment + grace_s
            old.expires_at = end if old.expires_at is None else min(end, old.expires_at)
            return told(row)

        return await self._database.write(write)

    async def revoke(self, key_id: str) -> Key:
        """End a key now; one that has ended stays as it is.

        Raises:
            ApiError: ``key_not_found``.
        """

        def write(session: Session) -> Key:
            row = session.get(KeyRow, key_id, with_for_update=True)
            if row is None:
                raise not_found(key_id)
            if row.revoked_at is None:
                row.revoked_at = time.time()
            return told(row)

        return await self._database.write(write)

    async def page(self, tenant: str | None = None) -> list[Key]:
        """Return keys, the newest first, of all tenants or of one."""

        def read(session: Session) -> list[Key]:
            wanted = select(KeyRow).order_by(KeyRow.created_at.desc(), KeyRow.id)
            if tenant is not None:
                wanted = wanted.where(KeyRow.tenant == tenant)
            return [told(row) for row in session.scalars(wanted)]

        return await self._database.read(read)

    async def has_open(self, tier: Tier, scope: Scope) -> bool:
        """Tell whether a key of a tier opens something."""

        def read(session: Session) -> bool:
            moment = time.time()
            rows = session.scalars(
                select(KeyRow).where(KeyRow.tier == tier.value, KeyRow.revoked_at.is_(None))
            )
            return any(is_open(row, moment) and scope in told(row).scopes for row in rows)

        return await self._database.read(read)

    async def find(self, key_ids: Collection[str]) -> dict[str, tuple[KeyRow, Limits]]:
        """Return those of these keys that there are as they are kept, and the limits of their tenants."""

        def read(session: Session) -> dict[str, tuple[KeyRow, Limits]]:
            # One statement, whether or not there is such a key: how long it takes tells nothing of it.
            joined = select(KeyRow, TenantRow.limits).join(TenantRow, TenantRow.name == KeyRow.tenant)
            found: dict[str, tuple[KeyRow, Limits]] = {}
            ids = list(key_ids)
            for start in range(0, len(ids), _MAX_IDS):
                some = joined.where(KeyRow.id.in_(ids[start : start + _MAX_IDS]))
                for row, limits in session.execute(some):
                    found[row.id] = row, Limits.model_validate(limits)
            return found

        return await self._database.read(read)

    async def heir(self, key_id: str) -> tuple[KeyRow, Limits] | None:
        """Return a key that opens something or, where it was replaced, the newest successor that does."""

        def read(session: Session) -> tuple[KeyRow, Limits] | None:
            moment = time.time()
            row = session.get(KeyRow, key_id)
            left = [] if row is None else [row]
            while left:
                row = left.pop()
                if row.revoked_at is not None:
                    continue
                if is_open(row, moment):
                    return row, Limits.model_validate(session.get_one(TenantRow, row.tenant).limits)
                # It may have been replaced more than once: where the first answer was lost, for one.
                successors = select(KeyRow).where(KeyRow.replaces == row.id).order_by(KeyRow.created_at)
                left.extend(session.scalars(successors))
            return None

        return await self._database.read(read)

    async def tenants(self) -> list[Tenant]:
        """Return the tenants, by name."""

        def read(session: Session) -> list[Tenant]:
            return [_tenant(row) for row in session.scalars(select(TenantRow).order_by(TenantRow.name))]

        return await self._database.read(read)

    async def limit(self, tenant: str, limits: Limits) -> Tenant:
        """Set the limits of all keys of a tenant together.

        Raises:
            ApiError: ``tenant_not_found``.
        """

        def write(session: Session) -> Tenant:
            row = session.get(TenantRow, tenant)
            if row is None:
                raise ApiError(ErrorCode.TENANT_NOT_FOUND, f"There is no tenant {tenant!r}.", "tenant")
            row.limits = _kept(limits)
            return _tenant(row)

        return await self._database.write(write)

    async def is_used(self) -> bool:
        """Tell whether a key was ever made: from then on nobody is let in without one."""
        found = await self._database.read(lambda session: session.scalar(select(func.count(KeyRow.id))))
        return bool(found)

    async def note_use(self, key_id: str, kept: str | None = None) -> None:
        """Write down that a key was used now.

        Args:
            key_id: The key.
            kept: Its hash, where that is to be another one.
        """
        new: dict[str, Any] = {"last_used_at": time.time()} | ({} if kept is None else {"hash": kept})
        change = update(KeyRow).where(KeyRow.id == key_id).values(**new)
        await self._database.write(lambda session: session.execute(change))


def is_open(row: KeyRow, moment: float) -> bool:
    """Tell whether a key opens what it says at a moment."""
    return row.revoked_at is None and (row.expires_at is None or moment < row.expires_at)


def told(row: KeyRow) -> Key:
    """Return what lists say of a key."""
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
    )


def _tenant(row: TenantRow) -> Tenant:
    return Tenant(name=row.name, limits=Limits.model_validate(row.limits), created_at=row.created_at)


def _kept(limits: Limits) -> dict[str, Any]:
    return limits.model_dump(exclude_none=True)


def not_found(key_id: str) -> ApiError:
    """Return the error for an id that no key has."""
    return ApiError(ErrorCode.KEY_NOT_FOUND, f"There is no key {key_id!r}.", "key_id")


__all__ = ["KeyStore", "KeyTakenError", "is_open", "not_found", "told"]
