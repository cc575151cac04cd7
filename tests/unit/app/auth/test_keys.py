"""Key checks: their timing reveals nothing about keys, and no client can make them costly for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import pytest
from sqlalchemy import Engine, event

from api_schemas.administration import CreatedKey, Limits, NewKey
from api_schemas.errors import ApiError
from app.auth import keys as keys_module
from app.auth import keys as lookups_module
from app.auth.keys import Keys, LoginThrottle, Lookups, hashed, matches, new_secret
from app.limits.limit import ThrottledError
from app.storage.database import Database
from app.storage.keys import KeyStore
from app.storage.tables import KeyRow

NEW = NewKey(tenant="acme")


class Statements:
    """The statements that were run, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def note(self, _connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        self.done.append(statement)

    def taken(self) -> list[str]:
        done, self.done = self.done, []
        return done


class Bench:
    """Keys over a database, and what they cost."""

    def __init__(self, keys: Keys, database: Database, costs: Statements) -> None:
        self.keys = keys
        self.database = database
        self.costs = costs

    async def show(self, key: str, address: str = "10.0.0.1") -> str:
        """Show a key; returns the tenant that it is of, or why it opens nothing."""
        try:
            return (await self.keys.principal(f"Bearer {key}", address)).tenant
        except ApiError as error:
            return f"{error.code}: {error.message}"

    async def cost(self, key: str) -> list[str]:
        self.costs.taken()
        await self.show(key)
        return self.costs.taken()


@pytest.fixture
async def bench(database: Database) -> AsyncIterator[Bench]:
    costs = Statements()
    event.listen(Engine, "before_cursor_execute", costs.note)
    bench = Bench(Keys(KeyStore(database)), database, costs)
    yield bench
    await bench.keys.close()
    event.remove(Engine, "before_cursor_execute", costs.note)


def guess(key: CreatedKey) -> str:
    """Return a key of this id that is none."""
    return f"nns_{key.id}_{new_secret().text.split('_', 2)[2]}"


@pytest.mark.both_databases
async def test_keys_that_open_nothing_cost_the_same_whatever_the_reason(bench: Bench):
    open_, revoked, expired = [await bench.keys.create(NEW) for _ in range(3)]
    await bench.keys.revoke(revoked.id)
    await bench.keys.rotate(expired.id, 0)
    await bench.show(new_secret().text)  # whether there are keys at all is asked once
    tried = [new_secret().text, guess(open_), guess(revoked), revoked.key, expired.key]
    costs = [await bench.cost(text) for text in tried]
    assert costs == [costs[0]] * len(tried)
    assert len([one for one in costs[0] if "keys" in one]) == 1
    # The second time none costs anything, and all are told the same.
    assert [await bench.cost(text) for text in tried] == [[]] * 5
    assert len({await bench.show(text) for text in tried}) == 1
    assert await bench.show(open_.key) == "acme"


@pytest.mark.both_databases
async def test_random_keys_are_read_together_and_a_right_one_with_them(bench: Bench):
    key = await bench.keys.create(NEW)
    await bench.show(new_secret().text)  # whether there are keys at all is asked once
    bench.costs.taken()
    flood = [new_secret().text for _ in range(2500)]
    answers = await asyncio.gather(*(bench.show(text) for text in [*flood, key.key]))
    assert answers[-1] == "acme"
    assert all("invalid_api_key" in answer for answer in answers[:-1])
    statements = [one for one in bench.costs.taken() if one.startswith("SELECT")]
    assert len(statements) <= 5


class HeldStore(KeyStore):
    """Returns what it has read when it is let."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.has_read, self.may_return = asyncio.Event(), asyncio.Event()

    async def find(self, key_ids: Collection[str]) -> dict[str, tuple[KeyRow, Limits]]:
        found = await super().find(key_ids)
        self.has_read.set()
        await self.may_return.wait()
        return found


async def test_a_key_that_is_revoked_while_it_is_read_is_not_remembered(bench: Bench):
    store = HeldStore(bench.database)
    keys = Keys(store)
    key = await keys.create(NEW)
    reading = asyncio.create_task(keys.principal(f"Bearer {key.key}"))
    await store.has_read.wait()
    await keys.revoke(key.id)
    store.may_return.set()
    await reading  # it was right when it was read
    with pytest.raises(ApiError, match="has ended"):
        await keys.principal(f"Bearer {key.key}")
    await keys.close()


def test_a_hash_is_compared_to_its_last_character():
    secret = new_secret()
    kept = hashed(secret)
    assert matches(secret, kept)
    for wrong in (kept[:-1], kept[:-1] + ("0" if kept[-1] != "0" else "1"), kept + "0"):
        assert not matches(secret, wrong)


async def test_a_key_that_another_server_has_made_works_at_once(bench: Bench):
    await bench.keys.create(NEW)
    other = Keys(KeyStore(bench.database))
    for _ in range(3):
        key = await other.create(NEW)
        assert await bench.show(key.key) == "acme"
    await other.close()


async def test_a_key_that_was_shown_is_looked_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    key = await bench.keys.create(NEW)
    assert await bench.show(key.key) == "acme"
    monkeypatch.setattr(keys_module, "_CACHE_TTL_S", 0.0)
    await bench.keys.limit("acme", Limits(concurrency=7))
    for _ in range(3):
        principal = await bench.keys.principal(f"Bearer {key.key}", "10.0.0.1")
        assert principal.tenant_limits.concurrency == 7
    await bench.keys.revoke(key.id)
    assert "invalid_api_key" in await bench.show(key.key)


async def test_a_right_key_is_let_in_whatever_was_guessed_before(bench: Bench):
    key, later = [await bench.keys.create(NEW) for _ in range(2)]
    flood = [*(guess(key) for _ in range(400)), *(new_secret().text for _ in range(400))]
    answers = await asyncio.gather(*(bench.show(text) for text in flood))
    # Those of one id are told to wait after two hundred.
    assert 150 < sum("rate_limit_exceeded" in answer for answer in answers) <= 200
    assert sum("invalid_api_key" in answer for answer in answers) >= 600
    # Neither key was seen before; both come from where the guesses did.
    assert await bench.show(key.key) == "acme"
    assert await bench.show(later.key) == "acme"


def test_an_address_may_guess_again_after_a_while_and_at_other_ids_at_once():
    moment = 0.0
    guesses = LoginThrottle(lambda: moment)
    for _ in range(200):
        guesses.count("a", "10.0.0.1")
    with pytest.raises(ThrottledError) as caught:
        guesses.count("a", "10.0.0.1")
    assert caught.value.headers == {"Retry-After": "1"}
    guesses.count("b", "10.0.0.1")
    guesses.count("a", "10.0.0.2")
    moment = 2.0
    for _ in range(2):
        guesses.count("a", "10.0.0.1")
    with pytest.raises(ThrottledError):
        guesses.count("a", "::ffff:10.0.0.1")


def test_an_ipv6_network_counts_as_one_address_and_memory_is_bounded():
    guesses = LoginThrottle(lambda: 0.0)
    for count in range(200):
        guesses.count("a", f"2001:db8::{count:x}")
    with pytest.raises(ThrottledError):
        guesses.count("a", "2001:db8::ffff:1")
    for count in range(30_000):
        guesses.count("a", f"10.{count // 65536}.{count // 256 % 256}.{count % 256}")
    guesses.count("a", "2001:db8::ffff:1")  # of which nothing is remembered


@pytest.mark.both_databases
async def test_jobs_go_on_for_any_successor_that_works(bench: Bench):
    async def holder() -> str | None:
        principal = await bench.keys.holder(first.id)
        return None if principal is None else principal.key_id

    first = await bench.keys.create(NEW)
    second, third = [await bench.keys.rotate(first.id, 60) for _ in range(2)]
    assert await holder() == first.id
    newest = await bench.keys.rotate(first.id, 0)
    fourth = await bench.keys.rotate(third.id, 0)
    assert await holder() == newest.id
    await bench.keys.revoke(newest.id)
    assert await holder() == fourth.id
    await bench.keys.revoke(fourth.id)
    assert await holder() == second.id
    await bench.keys.revoke(second.id)
    assert await holder() is None


class Table:
    """What is read, and the ids of each reading.

    Attributes:
        numbers: By id.
        read: Ids that were asked for, together.
        may_end: Readings last until it is set.
    """

    def __init__(self) -> None:
        self.numbers = {"a": 1}
        self.read: list[set[str]] = []
        self.may_end = asyncio.Event()
        self.fails = False

    async def find(self, ids: Collection[str]) -> dict[str, int]:
        self.read.append(set(ids))
        found = {one: self.numbers[one] for one in ids if one in self.numbers}
        await self.may_end.wait()
        if self.fails:
            raise OSError("no database")
        return found


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "_PAUSE_S", 0.0)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_pause")
async def test_what_is_asked_during_a_reading_is_read_after_it_and_together():
    table = Table()
    lookups = Lookups(table.find)
    first = asyncio.create_task(lookups.find("b"))
    await turns()
    table.numbers["b"] = 2  # made while the reading, which has not seen it, goes on
    others = [asyncio.create_task(lookups.find(one)) for one in "abbc"]
    await turns()
    table.may_end.set()
    assert await first is None
    assert await asyncio.gather(*others) == [1, 2, 2, None]
    assert table.read == [{"b"}, {"a", "b", "c"}]


@pytest.mark.usefixtures("no_pause")
async def test_a_failed_lookup_raises_for_its_callers_and_the_next_goes_on():
    table = Table()
    lookups = Lookups(table.find)
    table.fails = True
    table.may_end.set()
    answers = await asyncio.gather(lookups.find("a"), lookups.find("b"), return_exceptions=True)
    assert all(isinstance(answer, OSError) for answer in answers)
    table.fails = False
    assert await lookups.find("a") == 1
