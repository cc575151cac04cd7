"""Which requests of packs take part in a step."""

from __future__ import annotations

import types
from typing import Any

import pytest

from nnsight_engine.vllm_backend.background import Background, PackEntry


class Clock:
    def __init__(self) -> None:
        self.moment = 0.0

    def __call__(self) -> float:
        return self.moment


def request(name: str, num_computed: int = 0) -> Any:
    return types.SimpleNamespace(request_id=name, num_computed_tokens=num_computed, num_prompt_tokens=10)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room() -> list[bool]:
    return [True]


@pytest.fixture
def background(clock: Clock, room: list[bool]) -> Background:
    return Background(lambda _: room[0], clock)


def test_a_pack_starts_once_all_have_arrived_and_in_their_order(background: Background) -> None:
    requests = {name: request(name) for name in "ab"}
    assert background.add("b", PackEntry("p", 2, 1)) == []
    assert background.held({"b": requests["b"]}) == {"b"}
    assert background.add("a", PackEntry("p", 2, 0)) == ["a", "b"]
    assert background.held(requests) == set()


def test_one_pack_at_a_time_and_the_next_while_its_step_is_under_way(
    background: Background, room: list[bool]
) -> None:
    requests = {name: request(name) for name in "abc"}
    for name, pack in zip("abc", "ppq", strict=True):
        background.add(name, PackEntry(pack, "ppq".count(pack), int(name == "b")))
    assert background.held(requests) == {"c"}
    requests["a"].num_computed_tokens = 4  # a prompt that is longer than a step
    assert background.held(requests) == {"c"}
    for name in "ab":
        requests[name].num_computed_tokens = 10
    room[0] = False
    assert background.held(requests) == {"a", "b", "c"}
    room[0] = True
    assert background.held(requests) == {"a", "b"}
    background.keep({"c"})
    room[0] = False  # never, without others that end: then in parts
    assert background.held({"c": requests["c"]}) == set()


def test_others_go_first_and_a_pack_gets_a_small_share_beside_them(
    background: Background, clock: Clock
) -> None:
    requests = {name: request(name) for name in ("mine", "theirs")}
    background.add("mine", PackEntry("p", 1, 0))
    background.note_step(["mine"], 2.0)
    assert background.held(requests) == {"mine"}
    clock.moment = 37.9
    assert background.held(requests) == {"mine"}
    clock.moment = 38.1
    assert background.held(requests) == {"theirs"}
    background.note_step(["theirs"], 5.0)
    assert background.held(requests) == {"theirs"}
    del requests["theirs"]
    assert background.held(requests) == set()


def test_beside_others_a_pack_starts_only_with_room_and_rests_if_it_gets_nothing(
    background: Background, clock: Clock, room: list[bool]
) -> None:
    requests = {name: request(name) for name in ("mine", "theirs")}
    background.add("mine", PackEntry("p", 1, 0))
    room[0] = False
    assert background.held(requests) == {"mine"}
    room[0] = True
    assert background.held(requests) == {"theirs"}
    background.note_nothing_scheduled()
    assert background.held(requests) == {"mine"}
    clock.moment += 1
    assert background.held(requests) == {"theirs"}


def test_a_paused_engine_starts_no_pack_and_ends_the_one_that_has_begun(background: Background) -> None:
    requests = {"mine": request("mine")}
    background.add("mine", PackEntry("p", 1, 0))
    assert background.held(requests, may_start=False) == {"mine"}
    requests["mine"].num_computed_tokens = 5
    assert background.held(requests, may_start=False) == set()


def test_nobody_waits_for_a_request_that_has_ended(background: Background) -> None:
    for index, name in enumerate("abc"):
        assert not background.add(name, PackEntry("p", 4, index))
    requests = {name: request(name) for name in "bc"}
    background.keep(requests)
    assert background.held(requests) == {"b", "c"}  # the fourth is missing
    background.keep({})
    assert not background
    assert background.add("d", PackEntry("p", 4, 3)) == ["d"]
    assert background.held({"d": request("d")}) == set()
    background.keep({})
    assert not background.members


@pytest.mark.parametrize("entry", [{"key": "p"}, "p", {"key": 1, "size": 1, "index": 0}, 3])
def test_an_entry_of_another_form_is_none(entry: Any) -> None:
    assert PackEntry.of(entry) is None
    assert PackEntry.of(None) is None
