"""Authenticates requests by their key, and creates, rotates and revokes keys.

The text of a key is ``nns_<id>_<secret>``. The id is not secret. The secret has 256 random bits, so its
SHA-256 is stored; a slow hash would let guesses consume CPU time and delay valid keys. Keys of ``--api-key``
and ``VLLM_API_KEY`` have no rows in the database.

A check is cached for some seconds, during which another process's revocation is not noticed; one by this
process takes effect at once. After that, rows are read in batches: random ids cause a few statements per
second, not a query for each. An invalid key costs the same whether it is wrong, expired or nonexistent.

Invalid keys are limited by key id and client network, an IPv4 address or an IPv6 /64. A key counts only after
it was found invalid, so a valid key is always accepted, however many invalid ones came.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, Generic, TypeVar

from api_schemas.administration import CreatedKey, Key, Limits, NewKey, Scope, Tenant, Tier
from api_schemas.errors import ApiError, ErrorCode
from app.auth.principal import ANONYMOUS, Principal
from app.limits.limit import ThrottledError
from app.storage.keys import KeyStore, is_open, key_from_row
from app.storage.tables import KeyRow

_SCHEME: Final = "bearer"
_HASH_PREFIX: Final = "sha256:"
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32
_KEY_FORM: Final = re.compile(r"nns_([0-9a-f]{16})_([0-9A-Za-z_-]{43})")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret:
    id: str
    text: str


def bearer(authorization: str | None) -> str:
    """Return the credentials of an ``Authorization: Bearer`` header, unvalidated; empty if there are none."""
    scheme, _, text = (authorization or "").partition(" ")
    return text.strip() if scheme.lower() == _SCHEME else ""


def new_secret() -> Secret:
    key_id = secrets.token_hex(_ID_BYTES)
    return Secret(key_id, f"nns_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}")


def parse_key(text: str) -> Secret | None:
    """Parse a client's key; None if its format is not that of a key."""
    match = _KEY_FORM.fullmatch(text)
    return None if match is None else Secret(match[1], text)


def hashed(secret: Secret) -> str:
    return _HASH_PREFIX + hashlib.sha256(secret.text.encode()).hexdigest()


def matches(secret: Secret, hash_: str) -> bool:
    """Return whether the hash is that of this key; takes the same time in either case."""
    return hmac.compare_digest(hashed(secret), hash_)


GIVEN_ID: Final = "api-key"
_SCOPES: Final = frozenset(Scope) - {Scope.ADMIN}
_HOLDER_OF_GIVEN_KEYS: Final = Principal(GIVEN_ID, GIVEN_ID, _SCOPES, Tier.SANDBOXED, Limits(), Limits())
"""The tenant of all these keys, without limits. Its code runs in a sandbox."""


class GivenKeys:
    """The keys of ``--api-key`` and ``VLLM_API_KEY``, by their hashes."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._digests = [_digest(text) for text in texts]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def principal(self, text: str) -> Principal | None:
        """Return the caller that a text authenticates; None if it is none of the keys.

        The time depends on neither the text nor the keys.
        """
        digest = _digest(text)
        matches = [hmac.compare_digest(digest, key_digest) for key_digest in self._digests]
        return _HOLDER_OF_GIVEN_KEYS if any(matches) else None

    def holder(self, key_id: str) -> Principal | None:
        """Return the caller for which work begun with such a key continues; None for other ids."""
        return _HOLDER_OF_GIVEN_KEYS if self and key_id == GIVEN_ID else None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


_PAUSE_S: Final = 0.05
"""The pause between two statements, in seconds."""

_Found = TypeVar("_Found")


class Lookups(Generic[_Found]):
    """Reads the rows of ids in batches: ids that arrive during a read are read together by the next."""

    def __init__(self, read: Callable[[Collection[str]], Awaitable[Mapping[str, _Found]]]) -> None:
        self._read = read
        self._read_lock = asyncio.Lock()
        self._next_read: asyncio.Task[Mapping[str, _Found]] | None = None
        self._requested: set[str] = set()
        self._free_at = 0.0

    async def find(self, key_id: str) -> _Found | None:
        """Return the value of an id, read after this call began, or None."""
        if self._next_read is None:
            self._next_read = asyncio.create_task(self._read_next())
        self._requested.add(key_id)
        # Others wait for the same task, so a cancelled caller must not cancel it.
        return (await asyncio.shield(self._next_read)).get(key_id)

    async def _read_next(self) -> Mapping[str, _Found]:
        """Read all ids requested until the previous read is over; ``find`` begins the next one."""
        async with self._read_lock:
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
            requested, self._requested, self._next_read = self._requested, set(), None
            try:
                return await self._read(requested)
            finally:
                self._free_at = time.monotonic() + _PAUSE_S


_BURST: Final = 200.0
_PER_S: Final = 1.0
_MAX_ENTRIES: Final = 10_000
_IPV6_NETWORK: Final = 64

_Source = tuple[str, str]


class LoginThrottle:
    """Counts invalid keys: a burst of 200 per id and network, then one per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # What remains of a source's burst, and the time at which that was so.
        self._allowances: dict[_Source, tuple[float, float]] = {}

    def count(self, key_id: str, address: str) -> None:
        """Count an invalid key of this id from this address; raises ThrottledError beyond the allowance."""
        source = key_id, _network_of(address)
        remaining, moment = self._remaining(source), self._clock()
        if remaining < 1:
            raise ThrottledError(
                "Too many wrong keys with this id came from this address: send a valid one, or wait.",
                {"Retry-After": str(math.ceil((1 - remaining) / _PER_S))},
            )
        if source not in self._allowances and len(self._allowances) >= _MAX_ENTRIES:
            self._evict()
        self._allowances[source] = remaining - 1, moment

    def _remaining(self, source: _Source) -> float:
        remaining, moment = self._allowances.get(source, (_BURST, self._clock()))
        return min(_BURST, remaining + (self._clock() - moment) * _PER_S)

    def _evict(self) -> None:
        """Drop entries whose allowance is full again, or all if too many remain."""
        self._allowances = {
            source: allowance
            for source, allowance in self._allowances.items()
            if self._remaining(source) < _BURST
        }
        if len(self._allowances) >= _MAX_ENTRIES:
            self._allowances.clear()


def _network_of(address: str) -> str:
    """Return an IPv4 address itself and the /64 of an IPv6 one, as a client may have all of that."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a client on a Unix socket has no address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed.packed, _IPV6_NETWORK), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


logger = logging.getLogger(__name__)

_CACHE_TTL_S: Final = 10.0
_MAX_CHECKS: Final = 10_000
_USE_RESOLUTION_S: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class _CachedCheck:
    """A cached check; ``principal`` is None for an invalid key."""

    principal: Principal | None
    until: float


_INVALID: Final = _CachedCheck(None, 0.0)


class Keys:
    def __init__(self, store: KeyStore, given_keys: GivenKeys | None = None) -> None:
        self._store = store
        self._given_keys = given_keys or GivenKeys()
        self._lookups = Lookups(store.find)
        self._checks: dict[bytes, _CachedCheck] = {}
        self._generation = 0  # changes when cached checks end, so that none under way is cached
        self._has_keys = False
        self._has_keys_until = 0.0  # when the absence of keys is checked again
        self._throttle = LoginThrottle()
        # The hash that nonexistent keys are compared with, for equal timing.
        self._dummy_hash = hashed(new_secret())
        self._notes: set[asyncio.Task[None]] = set()

    async def are_required(self) -> bool:
        """Return whether this server has keys; once it has, that does not change."""
        if self._given_keys:
            return True
        moment = time.monotonic()
        if not self._has_keys and moment >= self._has_keys_until:
            self._has_keys = await self._store.is_used()
            self._has_keys_until = moment + _CACHE_TTL_S
        return self._has_keys

    async def need_sandbox(self) -> bool:
        """Return whether there is a valid key whose code runs in a sandbox."""
        if self._given_keys:
            return True
        return await self._store.has_open(Tier.SANDBOXED, Scope.CODE)

    async def principal(self, authorization: str | None, address: str = "") -> Principal:
        """Authenticate a request by its ``Authorization`` header and its client's address.

        Raises:
            ApiError: ``missing_api_key``; ``invalid_api_key``: the key is unknown or has ended;
                ``rate_limit_exceeded``: too many invalid keys came from the address.
        """
        if not await self.are_required():
            return ANONYMOUS
        text = bearer(authorization)
        if not text:
            raise ApiError(
                ErrorCode.NO_KEY,
                "This server requires a key: send it as `Authorization: Bearer nns_…`. The server's operator "
                "creates keys with `nnsight-engine keys create`.",
            )
        given_caller = self._given_keys.principal(text)
        if given_caller is not None:
            return given_caller
        check = await self._check_text(text, address)
        if check.principal is None:
            raise ApiError(
                ErrorCode.INVALID_KEY,
                "The key of this request is unknown or has ended; ask the server's operator for another one.",
            )
        return check.principal

    async def _check_text(self, text: str, address: str) -> _CachedCheck:
        """Return the check of a key, cached or new; raises ThrottledError for too many invalid ones."""
        secret = parse_key(text)
        if secret is None:
            return _INVALID
        digest = hashlib.sha256(text.encode()).digest()
        check = self._checks.get(digest)
        if check is None or time.monotonic() >= check.until:
            generation = self._generation
            check = await self._check_secret(secret)
            if generation == self._generation:  # otherwise the key may have been revoked meanwhile
                self._remember(digest, check)
        if check.principal is None:
            self._throttle.count(secret.id, address)
        return check

    def _remember(self, digest: bytes, check: _CachedCheck) -> None:
        if len(self._checks) >= _MAX_CHECKS:
            # Invalid keys are evicted first: guesses may have filled the cache.
            self._checks = {
                key: cached for key, cached in self._checks.items() if cached.principal is not None
            }
            if len(self._checks) >= _MAX_CHECKS:
                self._checks.clear()
        self._checks[digest] = check

    async def _check_secret(self, secret: Secret) -> _CachedCheck:
        """Check a key against its row; its last use is noted in the background."""
        until = time.monotonic() + _CACHE_TTL_S
        row_and_limits = await self._lookups.find(secret.id)
        is_right = matches(secret, self._dummy_hash if row_and_limits is None else row_and_limits[0].hash)
        moment = time.time()
        if row_and_limits is None or not is_right or not is_open(row_and_limits[0], moment):
            return _CachedCheck(None, until)
        row, tenant_limits = row_and_limits
        if row.expires_at is not None:
            until = min(until, time.monotonic() + row.expires_at - moment)
        if row.last_used_at is None or row.last_used_at < moment - _USE_RESOLUTION_S:
            task = asyncio.create_task(self._note_use(row.id))
            self._notes.add(task)
            task.add_done_callback(self._notes.discard)
        return _CachedCheck(_principal(row, tenant_limits), until)

    async def holder(self, key_id: str) -> Principal | None:
        """Return the caller for which work of a key, or of none (empty), continues.

        None if the key has ended without a valid successor.
        """
        if not key_id:
            return ANONYMOUS
        given_caller = self._given_keys.holder(key_id)
        if given_caller is not None:
            return given_caller
        row_and_limits = await self._store.valid_successor(key_id)
        return None if row_and_limits is None else _principal(*row_and_limits)

    async def _note_use(self, key_id: str) -> None:
        try:
            await self._store.note_use(key_id)
        except Exception:
            logger.exception("recording the use of key %s in the database failed", key_id)

    async def close(self) -> None:
        """Finish pending writes; the database must still be open."""
        await asyncio.gather(*self._notes, return_exceptions=True)

    # Keys themselves.

    async def create(self, new: NewKey) -> CreatedKey:
        """Create a key; the returned object is the only copy of its secret."""
        secret = new_secret()
        key = await self._store.add(new, secret.id, hashed(secret))
        logger.info("key %s was created for tenant %s", key.id, key.tenant)
        self._has_keys = True
        return CreatedKey(**key.model_dump(), key=secret.text)

    async def adopt(self, secret: Secret, new: NewKey) -> Key:
        """Create a key whose secret was chosen by the caller; raises KeyTakenError if the id is in use."""
        key = await self._store.add(new, secret.id, hashed(secret))
        logger.info("key %s was adopted for tenant %s", key.id, key.tenant)
        self._has_keys = True
        return key

    async def recognized(self, secret: Secret) -> Key | None:
        """Return the key with this secret, even if it has ended; None if the id is unknown.

        It raises ``invalid_api_key`` if the id belongs to a key with another secret.
        """
        row_and_limits = await self._lookups.find(secret.id)
        if row_and_limits is None:
            return None
        if not matches(secret, row_and_limits[0].hash):
            raise ApiError(
                ErrorCode.INVALID_KEY,
                f"The id {secret.id} belongs to a key with another secret; generate a new key.",
            )
        return key_from_row(row_and_limits[0])

    async def rotate(self, key_id: str, grace_s: float) -> CreatedKey:
        """Create a key with the rights of another, which expires after ``grace_s`` seconds; ``key_ended``."""
        secret = new_secret()
        key = await self._store.replace(key_id, secret.id, hashed(secret), grace_s)
        self._expire_cached(key_id)
        logger.info("key %s replaces %s", key.id, key_id)
        return CreatedKey(**key.model_dump(), key=secret.text)

    async def revoke(self, key_id: str) -> Key:
        key = await self._store.revoke(key_id)
        self._expire_cached(key_id)
        logger.info("key %s was revoked", key_id)
        return key

    async def page(self, tenant: str | None = None) -> list[Key]:
        """Return keys, newest first, of one tenant or of all."""
        return await self._store.page(tenant)

    async def tenants(self) -> list[Tenant]:
        return await self._store.tenants()

    async def limit(self, tenant: str, limits: Limits) -> Tenant:
        """Set the limits of all keys of a tenant together; cached checks, which have the old ones, end."""
        changed = await self._store.limit(tenant, limits)
        self._generation += 1
        self._checks.clear()
        return changed

    def _expire_cached(self, key_id: str) -> None:
        """Forget the cached check of a key; checks that are under way now are not cached either."""
        self._generation += 1
        self._checks = {
            digest: check
            for digest, check in self._checks.items()
            if check.principal is None or check.principal.key_id != key_id
        }


def _principal(row: KeyRow, tenant_limits: Limits) -> Principal:
    return Principal(
        row.tenant,
        row.id,
        frozenset(map(Scope, row.scopes)),
        Tier(row.tier),
        Limits.model_validate(row.limits),
        tenant_limits,
        trusted_codecs=row.trusted_codecs,
        presets=None if row.presets is None else frozenset(row.presets),
    )
