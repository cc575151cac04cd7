"""Lookups made together: none is answered with what was read before it was asked for, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from app.auth import lookups as lookups_module
from app.auth.lookups import Lookups


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


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "_PAUSE_S", 0.0)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


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


async def test_a_failed_lookup_raises_for_its_callers_and_the_next_goes_on():
    table = Table()
    lookups = Lookups(table.find)
    table.fails = True
    table.may_end.set()
    answers = await asyncio.gather(lookups.find("a"), lookups.find("b"), return_exceptions=True)
    assert all(isinstance(answer, OSError) for answer in answers)
    table.fails = False
    assert await lookups.find("a") == 1
