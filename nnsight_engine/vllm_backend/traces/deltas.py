"""What a block has newly saved, step by step, for those who watch it while it runs.

A block that appends to a saved list for a thousand tokens would be costly to send whole a thousand times. So
what is told after a step is what changed: a value that is new or another one, and the items that a list grew
by. Items changed in place, things deep inside others, objects whose own code would have to run to write them,
and what the wire's limits refuse show at the end, when everything is collected. Whoever is told puts it
together again, see ``remote_backend.saves_so_far``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch

from nnsight_engine.serialization import EncodeError, encode

logger = logging.getLogger(__name__)

_SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
_CONTAINERS: Final = frozenset({list, tuple, dict, set})
_MAX_DEPTH: Final = 8
_MAX_BYTES: Final = 64 * 2**20
"""Of a tensor; a larger one is not worth the step's time."""


class Deltas:
    """Remembers what was told of one block's saves."""

    def __init__(self) -> None:
        """Start with nothing told."""
        self._told: dict[str, tuple[Any, Any]] = {}
        self._refused: dict[str, Any] = {}

    def of(self, saves: Mapping[str, Any]) -> bytes | None:
        """Return what changed since the last call as bytes, None if nothing did."""
        whole: dict[str, Any] = {}
        grown: dict[str, list[Any]] = {}
        for name, value in saves.items():
            if self._refused.get(name, self) is value:
                continue
            before, mark = self._told.get(name, (None, None))
            now = _mark(value)
            if mark == now and (value is before or (_is_scalar(value) and value == before)):
                continue
            is_grown = value is before and type(value) is list and mark[0] < now[0]
            new = value[mark[0] :] if is_grown else value
            if _is_plain(new):
                self._told[name] = (value, now)
                (grown if is_grown else whole)[name] = new
        if not whole and not grown:
            return None
        data = _encoded(whole, grown)
        if data is not None:
            return data
        bad = [name for name, value in whole.items() if _encoded({name: value}, {}) is None]
        bad += [name for name, items in grown.items() if _encoded({}, {name: items}) is None]
        if not bad:  # each fits and all together do not
            bad = [*whole, *grown]
        for name in bad:
            self._refuse(name, saves[name], is_whole=name in whole)
            (whole if name in whole else grown).pop(name)
        return _encoded(whole, grown) if whole or grown else None

    def _refuse(self, name: str, value: Any, *, is_whole: bool) -> None:
        """Forget that something was told; a list whose items were not goes whole, or not before the end."""
        del self._told[name]
        if is_whole:
            self._refused[name] = value


def _encoded(whole: Mapping[str, Any], grown: Mapping[str, Any]) -> bytes | None:
    try:
        return encode({"whole": whole, "grown": grown})
    except EncodeError:  # too much of it; reported when everything is collected
        logger.debug("something saved cannot be sent", exc_info=True)
        return None


def _is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Tell whether writing a value runs no code but ours."""
    kind = type(value)
    if kind in _CONTAINERS:
        items = [*value, *value.values()] if kind is dict else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in items)
    if kind is torch.Tensor:
        return value.layout is torch.strided and not value.requires_grad and value.nbytes <= _MAX_BYTES
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return type(value) in _SCALARS


def _mark(value: Any) -> Any:
    """Return what changes when a value does, as far as that is cheap to see."""
    kind = type(value)  # and not what it says it is
    if kind is torch.Tensor:
        return None if value.is_inference() else value._version  # noqa: SLF001 - has no public name
    if kind is list or kind is set:
        return (len(value),)
    return tuple(map(id, value.values())) if kind is dict else kind
