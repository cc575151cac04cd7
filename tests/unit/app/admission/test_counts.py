"""Counts over a minute, and storages that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage

from app.admission import counters as counts_module
from app.admission.counters import Counts, Used
from nnsight_engine.core.errors import UnsupportedOptionError

THREE = RateLimitItemPerMinute(3)


class Clock:
    """Tells what it was set to; minutes begin at whole ones of its own."""

    now = 60_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Later:
    """The time, and a monotonic clock that a test sets forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def end_pause(self) -> None:
        """Let the pause pass after which a storage that failed is asked again."""
        self.ahead_s += 60


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    later = Later()
    monkeypatch.setattr(counts_module, "time", later)
    return later


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(counts_module, "time", clock)
    return clock


class RemoteStorage(MemoryStorage):
    """Asks a server over a socket before each answer, like a client of Redis, and waits for it as long."""

    STORAGE_SCHEME = ["async+remote"]  # noqa: RUF012 - limits' own
    opened: ClassVar[list[RemoteStorage]] = []

    def __init__(self, uri: str, **_: str) -> None:
        super().__init__(uri)
        self.port = int(uri.rpartition(":")[2])
        self.opened.append(self)

    async def ask(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"?")
            assert await reader.readexactly(1) == b"!"
        finally:
            writer.close()

    async def get(self, key: str) -> int:
        await self.ask()
        return await super().get(key)

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        await self.ask()
        return await super().get_sliding_window(key, expiry)

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:  # fmt: skip
        await self.ask()
        return await super().acquire_sliding_window_entry(key, limit, expiry, amount)


class Answering:
    """A server that answers, or says nothing."""

    def __init__(self) -> None:
        self.answers = True
        self.num_asked = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_asked += 1
        with contextlib.suppress(ConnectionError):
            if self.answers:
                writer.write(b"!")
            await reader.read()
            writer.close()


@pytest.fixture
async def storage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Answering]:
    monkeypatch.setattr(counts_module, "_TIMEOUT_S", 0.1)
    answering = Answering()
    async with await asyncio.start_server(answering.serve, "127.0.0.1", 0) as server:
        answering.url = f"remote://name:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield answering


async def test_an_unreachable_storage_costs_one_wait_and_limits_hold_meanwhile(
    storage: Answering, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts(storage.url)
    assert await counts.hit(THREE, "a")
    storage.answers, num_asked = False, storage.num_asked
    with caplog.at_level(logging.WARNING):
        assert [await counts.hit(THREE, "a") for _ in range(5)] == [True, True, True, False, False]
        await counts.add("a", 70, 100)
        assert (await counts.used("a")).amount == 70
    assert (counts.num_failures, storage.num_asked) == (1, num_asked + 1)
    assert "TimeoutError" in caplog.text
    assert "secret" not in caplog.text
    # It is asked again after a pause, by one.
    later.end_pause()
    await asyncio.gather(*[counts.used("a") for _ in range(20)])
    assert (counts.num_failures, storage.num_asked) == (2, num_asked + 2)
    storage.answers = True
    later.end_pause()
    assert (await counts.used("a")).amount == 0  # there nobody was told
    num_asked = storage.num_asked
    await asyncio.gather(*[counts.used("a") for _ in range(3)])
    assert storage.num_asked >= num_asked + 3  # each asks, without a pause


async def test_a_refused_connection_to_the_storage_is_no_error(storage: Answering) -> None:
    counts = Counts("remote://127.0.0.1:1")
    assert await counts.test(THREE, "a")
    assert (await counts.stats(THREE, "a")).remaining == 3
    assert counts.num_failures == 1


def test_an_unknown_storage_is_refused_without_its_password() -> None:
    with pytest.raises(UnsupportedOptionError, match="'nosuch'") as caught:
        Counts("nosuch://name:secret@host")
    assert "secret" not in str(caught.value)


async def test_released_counts_go_to_the_minute_they_were_taken_in(clock: Clock) -> None:
    counts = Counts("memory://")
    taken, used = await counts.reserve("a", 100)
    assert used.amount == 100
    await counts.release(taken, 50)
    assert (await counts.used("a")).amount == 50
    clock.now += 60
    await counts.release(taken, 50)
    assert (await counts.used("a")).amount == 0
    late, _ = await counts.reserve("a", 100)
    clock.now += 120
    await counts.release(late, 100)
    assert (await counts.reserve("a", 10))[1].amount == 10


async def test_usage_beyond_a_minute_is_carried_into_the_next_ones(clock: Clock) -> None:
    counts = Counts("memory://")
    await asyncio.gather(*[counts.add("a", 1000, 100) for _ in range(3)])
    assert (await counts.used("a")).amount == 100
    wait_s = (await counts.used("a", ahead=True)).wait_s(99)
    assert wait_s == 30 * 60 + 1
    for _ in range(29):
        clock.now += 60
        assert (await counts.used("a")).amount >= 100
    clock.now += 61
    assert (await counts.used("a")).amount < 100
    await counts.add("b", 10**9, 100)  # what exceeds an hour is forgotten
    assert (await counts.used("b", ahead=True)).wait_s(99) == 61 * 60


async def test_a_recovered_storage_receives_only_counts_of_its_own(storage: Answering, later: Later) -> None:
    counts = Counts(storage.url)
    storage.answers = False
    alone, _ = await counts.reserve("a", 1000)
    storage.answers = True
    later.end_pause()
    await counts.release(alone, 990)
    assert (await counts.reserve("a", 5))[1].amount == 5
    shared, _ = await counts.reserve("a", 100)
    storage.answers = False
    await counts.release(shared, 100)  # which is noticed only now
    assert (await counts.used("a")).amount == 10
    storage.answers = True
    later.end_pause()
    assert (await counts.used("a")).amount == 105
    await RemoteStorage.opened[-1].reset()  # as where it was started again
    await counts.release(shared, 100)
    assert (await counts.reserve("a", 5))[1].amount == 5


@pytest.mark.parametrize(
    ("used", "room", "wait_s"),
    [
        (Used(0, 100, 0.5), 99, 31),
        (Used(0, 100, 0.5), 50, 60),
        (Used(0, 100, 0.5), 0, 90),
        (Used(100, 0, 0.5), 25, 15),
        (Used(100, 20, 0.5), 20, 30),
        (Used(100, 20, 0.5), 45, 15),
        (Used(0, 0, 1.0), 0, 1),
        (Used(100, 100, 0.5, (100, 20)), 50, 30 + 60 + 42),
        (Used(0, 100, 1.0, (100,)), 0, 180),
    ],
)
def test_the_wait_is_as_long_as_it_takes(used: Used, room: int, wait_s: int) -> None:
    assert used.wait_s(room) == wait_s
