"""Deltas of a block's saved values, step by step, for clients that stream them while the block runs.

To send a growing list in full after each step would be costly, so a message has only new and replaced values,
and items appended to a list. Some changes appear only in the collected result: items changed in place,
changes deep inside other objects, objects whose serialization would run their own code, and values beyond its
limits. The client reassembles the values, see ``remote_backend.saved_deltas``.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any, Final

import torch

from nnsight_engine.serialization import EncodeError, encode

logger = logging.getLogger(__name__)

_SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
_CONTAINERS: Final = frozenset({list, tuple, dict, set})
_MAX_DEPTH: Final = 8
_MAX_BYTES: Final = 64 * 2**20
"""Limit for a tensor; sending a larger one is not worth the time of the step."""


class Deltas:
    def __init__(self) -> None:
        self._sent: dict[str, tuple[Any, Any]] = {}
        self._refused: dict[str, Any] = {}

    def of(self, saves: Mapping[str, Any]) -> bytes | None:
        """Return the changes since the last call, encoded; None if there are none."""
        whole: dict[str, Any] = {}
        grown: dict[str, list[Any]] = {}
        for name, value in saves.items():
            if self._refused.get(name, self) is value:
                continue
            before, mark = self._sent.get(name, (None, None))
            now = _mark(value)
            if mark == now and (value is before or (_is_scalar(value) and value == before)):
                continue
            is_grown = value is before and type(value) is list and mark[0] < now[0]
            new = value[mark[0] :] if is_grown else value
            if _is_plain(new):
                self._sent[name] = (value, now)
                (grown if is_grown else whole)[name] = new
        if not whole and not grown:
            return None
        data = _encoded(whole, grown)
        if data is not None:
            return data
        bad = [name for name, value in whole.items() if _encoded({name: value}, {}) is None]
        bad += [name for name, items in grown.items() if _encoded({}, {name: items}) is None]
        if not bad:  # each value fits into a message, but not all of them together
            bad = [*whole, *grown]
        for name in bad:
            self._refuse(name, saves[name], is_whole=name in whole)
            (whole if name in whole else grown).pop(name)
        return _encoded(whole, grown) if whole or grown else None

    def _refuse(self, name: str, value: Any, *, is_whole: bool) -> None:
        """Mark a value as not sent: a grown list is sent whole at its next change, others only at the end."""
        del self._sent[name]
        if is_whole:
            self._refused[name] = value


def _encoded(whole: Mapping[str, Any], grown: Mapping[str, Any]) -> bytes | None:
    try:
        return encode({"whole": whole, "grown": grown})
    except EncodeError:  # beyond the limits; reported when the trace is collected
        logger.debug("something saved cannot be sent", exc_info=True)
        return None


def _is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether serializing a value runs no code other than this project's."""
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
    kind = type(value)  # not `isinstance`, which `__class__` can deceive
    if kind is torch.Tensor:
        return None if value.is_inference() else value._version  # noqa: SLF001 - has no public name
    if kind is list:
        return (len(value),)
    if kind is dict:
        return _Same([*value, *value.values()])
    return _Same([*value]) if kind is set else kind


class _Same:
    """The items of a container; it holds references, since a new item may have the id of a freed one."""

    __hash__ = None  # type: ignore[assignment] # compared only

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and len(self._items) == len(other._items)
            and all(map(operator.is_, self._items, other._items))
        )
