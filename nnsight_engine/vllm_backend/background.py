"""Requests that fill idle time: their packs run in steps of their own, after everybody else's requests.

A pack is computed together and with nothing beside it, so that its values do not depend on other traffic: the
same pack has the same bytes in every run. While others have requests, packs get a small share of the time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Container, Iterable, Mapping, Set
from typing import Any, Final

import msgspec
from vllm.v1.request import Request

BACKGROUND_KEY: Final = "nnsight_engine_background"
"""Key of the entry in ``extra_args`` by which a request belongs to a pack, see ``PackEntry``."""

_SHARE: Final = 0.05
"""Part of the engine's time for packs while others have requests."""
_REST_S: Final = 0.05
"""Rest of a pack that got nothing from its step."""


class PackEntry(msgspec.Struct, frozen=True):
    """A request's pack, with the number of its requests, and the request's place among them."""

    key: str
    size: int
    index: int

    @classmethod
    def of(cls, entry: Any) -> PackEntry | None:
        try:
            return None if entry is None else msgspec.convert(entry, cls)
        except msgspec.ValidationError:
            return None


@dataclasses.dataclass(slots=True)
class _Pack:
    """``places`` are those of its unfinished requests; ``num_missing`` have not arrived."""

    num_missing: int
    places: dict[str, int] = dataclasses.field(default_factory=dict)


class Background:
    """The packs of an engine, in the order of their first requests.

    ``has_room_for`` says whether blocks and slots for all of some requests are free.
    """

    def __init__(
        self, has_room_for: Callable[[list[Request]], bool], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._has_room_for = has_room_for
        self._clock = clock
        self._packs: dict[str, _Pack] = {}
        self._pack_of: dict[str, str] = {}
        self._rests_until = 0.0

    def __bool__(self) -> bool:
        return bool(self._pack_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pack_of

    @property
    def members(self) -> Set[str]:
        return self._pack_of.keys()

    def add(self, request_id: str, entry: PackEntry) -> list[str]:
        """Add a request; return those of its pack in their order if it is the last to arrive, else none."""
        pack = self._packs.setdefault(entry.key, _Pack(entry.size))
        pack.num_missing -= 1
        pack.places[request_id] = entry.index
        self._pack_of[request_id] = entry.key
        return [] if pack.num_missing else sorted(pack.places, key=pack.places.__getitem__)

    def keep(self, requests: Container[str]) -> None:
        """Forget the requests that have ended."""
        for request_id in [member for member in self._pack_of if member not in requests]:
            key = self._pack_of.pop(request_id)
            pack = self._packs[key]
            del pack.places[request_id]
            if not (pack.places or pack.num_missing):
                del self._packs[key]

    def held(self, requests: Mapping[str, Request], *, may_start: bool = True) -> set[str]:
        """Return the requests that do not take part in the next step: all packs but one, or all others.

        Without ``may_start``, as while the engine is paused, only a pack that has begun goes on.
        """
        others = requests.keys() - self._pack_of.keys()
        is_resting = bool(others) and self._clock() < self._rests_until
        chosen = [] if is_resting else self._choose(requests, has_others=bool(others), may_start=may_start)
        return {*others, *self._pack_of}.difference(chosen) if chosen else set(self._pack_of)

    def note_step(self, request_ids: Iterable[str], seconds: float) -> None:
        """Record a step that has ended, to give packs no more than their share."""
        if not self._pack_of.keys().isdisjoint(request_ids):
            self._rest(seconds * (1 - _SHARE) / _SHARE)

    def note_nothing_scheduled(self) -> None:
        """Record that the pack that was chosen got nothing: others have to go on before it can."""
        self._rest(_REST_S)

    def _rest(self, seconds: float) -> None:
        self._rests_until = self._clock() + seconds

    def _choose(self, requests: Mapping[str, Request], *, has_others: bool, may_start: bool) -> list[str]:
        """Return the requests of the first pack that has arrived and is not computed, if it has room."""
        is_any_under_way = False
        for pack in self._packs.values():
            pending = [
                request for request in map(requests.__getitem__, pack.places) if _is_to_compute(request)
            ]
            if not pending:
                is_any_under_way |= bool(pack.places)
            elif not pack.num_missing:
                has_begun = any(request.num_computed_tokens for request in pending)
                # Beyond an empty cache it is computed in parts, which are the same in every run.
                is_alone = not (has_others or is_any_under_way)
                if has_begun or (may_start and (is_alone or self._has_room_for(pending))):
                    return [request.request_id for request in pending]
                break
        return []


def _is_to_compute(request: Request) -> bool:
    return bool(request.num_computed_tokens < request.num_prompt_tokens)
