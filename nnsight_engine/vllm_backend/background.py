"""Requests that fill idle time: their packs run in steps of their own, after everybody else's requests.

A pack is computed together and with nothing beside it, so that its values do not depend on other traffic: the
same pack has the same bytes in every run. While others have requests, packs get a small share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Set
from typing import Any, Final

import msgspec
from vllm.v1.request import Request

BACKGROUND_KEY: Final = "nnsight_engine_background"
"""Key of the entry in ``extra_args`` by which a request belongs to a pack, see ``PackEntry``."""

_SHARE: Final = 0.05
"""Part of the engine's time for packs while others have requests."""


class PackEntry(msgspec.Struct, frozen=True):
    """A request's pack, with the number of its requests, and the request's place among them."""

    key: str
    size: int
    index: int

    @classmethod
    def of(cls, entry: Any) -> PackEntry | None:
        """Return the pack that a request's ``extra_args`` name; None if there is none, or no valid one."""
        try:
            return None if entry is None else msgspec.convert(entry, cls)
        except msgspec.ValidationError:
            return None


class Background:
    """The packs of an engine, in the order of their first requests; one has room if its blocks are free."""

    def __init__(
        self, has_room_for: Callable[[list[Request]], bool], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Begin without packs; ``has_room_for`` returns whether the engine can start requests now."""
        self._has_room_for = has_room_for
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self._members: dict[str, dict[str, int]] = {}
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
        """Add a request; return those of its pack in their order if it is the last, else none."""
        self._sizes[entry.key] = entry.size
        pack = self._members.setdefault(entry.key, {})
        pack[request_id] = entry.index
        self._pack_of[request_id] = entry.key
        return sorted(pack, key=pack.__getitem__) if len(pack) == entry.size else []

    def keep(self, requests: Container[str]) -> None:
        """Forget ended requests; a pack no longer waits for one that ended before the pack had arrived."""
        ended = [request_id for request_id in self._pack_of if request_id not in requests]
        for request_id in ended:
            key = self._pack_of.pop(request_id)
            del self._members[key][request_id]
            self._sizes[key] -= 1
            if not self._members[key]:
                del self._members[key], self._sizes[key]

    def held(self, requests: Mapping[str, Request]) -> set[str]:
        """Return the requests kept out of the next step: all but the chosen pack's; all packs' if none is."""
        others = requests.keys() - self._pack_of.keys()
        is_resting = bool(others) and self._clock() < self._rests_until
        chosen = [] if is_resting else self._chosen(requests)
        return {*others, *self._pack_of}.difference(chosen) if chosen else set(self._pack_of)

    def note_step(self, request_ids: Iterable[str], seconds: float) -> None:
        """Record a step that has ended, to give packs no more than their share."""
        if not self._pack_of.keys().isdisjoint(request_ids):
            self._rests_until = self._clock() + seconds * (1 - _SHARE) / _SHARE

    def _chosen(self, requests: Mapping[str, Request]) -> list[str]:
        """Return the requests of the first pack that has arrived and is not computed, if it has room."""
        is_any_under_way = False
        for key, members in self._members.items():
            pending = [request for request in map(requests.__getitem__, members) if _is_to_compute(request)]
            if not pending:
                is_any_under_way = True
            elif len(members) == self._sizes[key]:
                has_begun = any(request.num_computed_tokens for request in pending)
                # Without others that end soon, a pack beyond the cache is computed in parts.
                if has_begun or not is_any_under_way or self._has_room_for(pending):
                    return [request.request_id for request in pending]
                break
        return []


def _is_to_compute(request: Request) -> bool:
    return bool(request.num_computed_tokens < request.num_prompt_tokens)
