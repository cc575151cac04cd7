"""What senders choose, and a reader keeps when their message is long read, has a bound."""

from __future__ import annotations

import inspect
import linecache
import tracemalloc

import pytest

from nnsight_engine.serialization import TRUSTED, DecodeError, decode
from nnsight_engine.serialization.source.received_code import CodeCache, SourceCache
from tests.unit.serialization.messages import Writer, piece


def functions(num: int, *, line: int = 1) -> bytes:
    """Return a message of functions, as no sender writes one."""
    writer = Writer()
    pieces = [
        piece(f"def f(): return {number}\n", "f", file=f"/nowhere/{number}.py", line=line)
        for number in range(num)
    ]
    return writer.message(*map(writer.function, pieces))


def test_lines_far_down_take_no_room() -> None:
    decode(functions(1), policy=TRUSTED)
    tracemalloc.start()
    try:
        found = decode(functions(100, line=1_000_000), policy=TRUSTED)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
    assert [one() for one in found] == list(range(100))
    assert inspect.getsource(found[99]) == "def f(): return 99\n"
    with pytest.raises(DecodeError, match="claims line"):
        decode(functions(1, line=1_000_001), policy=TRUSTED)


@pytest.mark.parametrize("at", [0, 4, 5, 6])
def test_names_of_a_piece_are_short(at: int) -> None:
    fields = [*piece("def f(): pass\n", "f")]
    fields[at] = "x" * 5000
    writer = Writer()
    with pytest.raises(DecodeError, match=r"5,000 characters and may have 4,096"):
        writer.read(writer.function(tuple(fields)), TRUSTED)


def test_code_is_kept_by_the_characters_that_it_came_with() -> None:
    made: list[str] = []
    kept: CodeCache[str] = CodeCache(3, longest=10, max_characters=20)

    def get(key: str, length: int) -> str:
        def make() -> str:
            made.append(key)
            return key

        return kept.get(key, length, make)

    assert [get(one, 5) for one in "abab"] == list("abab")
    assert made == ["a", "b"]
    get("long", 11)
    get("long", 11)
    assert made[2:] == ["long", "long"]
    get("c", 10)  # together 20 characters
    get("d", 1)  # one entry and one character too many: `a` goes
    made.clear()
    assert [get(one, 5) for one in "bcda"] == list("bcda")
    assert made == ["a"]


def test_the_shelf_has_room_for_so_much() -> None:
    shelf = SourceCache(max_files=3, max_characters=1900)
    names = [f"/nowhere/shelf-{number}.py" for number in range(5)]
    for name in names:
        shelf.register(name, 10, "    one\n    two\n")
    assert [linecache.getline(name, 11) for name in names] == ["", "", *["    two\n"] * 3]
    assert linecache.getlines(names[4])[8:] == ["if 1:\n", "    one\n", "    two\n"]
    shelf.register(names[4], 1, "import this\n" * 11)
    assert linecache.getline(names[4], 11) == "import this\n"
    assert [name for name in names if linecache.getline(name, 10)] == [names[4]]
    shelf.register(names[4], 1, "x" * 3000)
    assert not any(name in linecache.cache for name in names)
