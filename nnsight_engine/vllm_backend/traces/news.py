"""What a block has newly saved, step by step, for those who watch it while it runs.

A block that appends to a saved list for a thousand tokens would be costly to send whole a thousand times. So
what is told after a step is what changed: a value that is new or another one, and the items that a list grew
by. Items changed in place, and things deep inside others, show at the end, when everything is collected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from nnsight_engine.envoys.cache import CacheView
from nnsight_engine.vllm_backend.traces.points import place_of
from nnsight_engine.wire import DecodeError, EncodeError, decode, encode

logger = logging.getLogger(__name__)


class News:
    """Remembers what was told of one block's saves."""

    def __init__(self) -> None:
        """Start with nothing told."""
        self._told: dict[str, tuple[Any, Any]] = {}
        self._unsendable: set[str] = set()

    def of(self, saves: Mapping[str, Any]) -> bytes | None:
        """Return what changed since the last call as bytes, None if nothing did."""
        whole: dict[str, Any] = {}
        grown: dict[str, list[Any]] = {}
        for name, value in saves.items():
            before, mark = self._told.get(name, (None, None))
            now = _mark(value)
            if name in self._unsendable or (value is before and mark == now):
                continue
            self._told[name] = (value, now)
            if value is before and isinstance(value, list) and mark[0] < now[0]:
                grown[name] = value[mark[0] :]
            else:
                whole[name] = value
        return self._encoded(whole, grown) if whole or grown else None

    def _encoded(self, whole: dict[str, Any], grown: dict[str, list[Any]]) -> bytes | None:
        try:
            return encode({"whole": whole, "grown": grown}, reference=_known_in_the_end)
        except EncodeError:
            logger.debug("something saved cannot be sent", exc_info=True)
        # What cannot travel is reported when everything is collected; the rest is told.
        for part in (whole, grown):
            for name in [name for name, value in part.items() if not _can_travel(value)]:
                self._unsendable.add(name)
                del part[name]
        return encode({"whole": whole, "grown": grown}, reference=_known_in_the_end)


def _can_travel(value: Any) -> bool:
    try:
        encode(value, reference=_known_in_the_end)
    except EncodeError:
        return False
    return True


def _known_in_the_end(value: Any) -> None:
    """Leave out caches, which are filled behind the block's back, and places in the model.

    Raises:
        EncodeError: This is one.
    """
    if isinstance(value, CacheView) or place_of(value) is not None:
        raise EncodeError(f"{type(value).__name__} is told in the end")


def _mark(value: Any) -> Any:
    """Return what changes when a value does, as far as that is cheap to see."""
    if isinstance(value, torch.Tensor):
        return value._version  # noqa: SLF001 - has no public name
    if isinstance(value, list | set):
        return (len(value),)
    return tuple(map(id, value.values())) if isinstance(value, dict) else None


def apply_news(saves: dict[str, Any], data: bytes) -> None:
    """Bring ``saves`` up to date with what ``News.of`` told."""
    try:
        message = decode(data)
    except DecodeError:  # as above: reported in the end, with its reason
        logger.debug("something saved cannot be read", exc_info=True)
        return
    saves.update(message["whole"])
    for name, items in message["grown"].items():
        # A list of its own each time: outputs that have left keep theirs.
        saves[name] = [*saves.get(name, ()), *items]
