"""Reports of running requests to the clients that subscribed: deltas of saved values, and printed text.

To send a growing list in full after each step would be costly, so a delta has only new and replaced values,
and items appended to a list. Some changes appear only in the collected result: items changed in place,
changes deep inside other objects, objects whose serialization would run their own code, and values beyond its
limits. The client reassembles the values, see ``remote_backend.saved_deltas``.

``sys.stdout`` dispatches on the writing thread: a block has a thread of its own, others use the original
stream.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.remote_backend.unread_output import Prints
from nnsight_engine.serialization import EncodeError, encode

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.context import TraceEntry

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

    def changes_in(self, saves: Mapping[str, Any]) -> bytes | None:
        """Return the changes since the last call, encoded; None if there are none.

        A new or replaced value is sent ``whole``, a list that has ``grown`` as its new items. Values that
        cannot be sent are left out, and are collected at the end.
        """
        whole: dict[str, Any] = {}
        grown: dict[str, list[Any]] = {}
        for name, value in saves.items():
            if self._refused.get(name, self) is value:  # ``self`` is no saved value
                continue
            value_before, mark_before = self._sent.get(name, (None, None))
            new_mark = _mark(value)
            if mark_before == new_mark and (
                value is value_before or (_is_scalar(value) and value == value_before)
            ):
                continue
            is_grown = value is value_before and type(value) is list and mark_before[0] < new_mark[0]
            new = value[mark_before[0] :] if is_grown else value
            if _is_plain(new):
                self._sent[name] = (value, new_mark)
                (grown if is_grown else whole)[name] = new
        if not whole and not grown:
            return None
        data = _encoded(whole, grown)
        if data is not None:
            return data
        unsendable = [name for name, value in whole.items() if _encoded({name: value}, {}) is None]
        unsendable += [name for name, items in grown.items() if _encoded({}, {name: items}) is None]
        if not unsendable:  # each value fits into a message, but not all of them together
            unsendable = [*whole, *grown]
        for name in unsendable:
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
    """Return what is unequal to an earlier mark if the value was changed in place, but not deep inside."""
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


class BlockStdout:
    def __init__(self, real: Any) -> None:
        self._real = real
        self._thread = threading.local()

    @staticmethod
    def install() -> BlockStdout:
        """Return the object that replaces ``sys.stdout``, installing it if there is none."""
        stdout = sys.stdout
        if not isinstance(stdout, BlockStdout):
            sys.stdout = stdout = BlockStdout(stdout)
        return stdout

    def enter(self, prints: Prints) -> None:
        """Redirect the calling thread's output to ``prints`` until the thread ends."""
        self._thread.prints = prints

    def write(self, text: str) -> int:
        """Write to what this thread has passed to ``enter``, or else to the real stream."""
        prints: Prints | None = getattr(self._thread, "prints", None)
        if prints is None:
            written: int = self._real.write(text)
            return written
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        prints.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


Report = tuple[str, int, bytes | None, str]
"""The trace's key, the block's index, the encoded delta of its saved values, and the printed text."""


class Reporting:
    def __init__(self) -> None:
        self._deltas: dict[str, Deltas] = {}  # by request id
        self._prints: dict[str, Prints] = {}  # by request id
        self._remaining: dict[str, str] = {}  # printed text, by the trace's key
        self._failed: dict[str, str] = {}  # how a block failed, by the trace's key

    def __len__(self) -> int:
        return len(self._prints) + len(self._remaining) + len(self._failed)

    def open(self, request_id: str, entry: TraceEntry) -> Callable[[], None]:
        """Register a request; return a function that its blocks' threads call before anything else."""
        if entry.streams:
            self._deltas[request_id] = Deltas()
        if not entry.prints:
            return _nothing
        prints = self._prints[request_id] = Prints()
        return partial(BlockStdout.install().enter, prints)

    def may_report(self, request_id: str) -> bool:
        return request_id in self._deltas or request_id in self._prints

    def report(
        self, request_id: str, entry: TraceEntry, saves: Callable[[], dict[str, Any]]
    ) -> Report | None:
        """Return the report of a request after a step; None if there is nothing to report."""
        prints = self._prints.get(request_id)
        printed = "" if prints is None else prints.take_lines()
        data = self._new_saves(request_id, saves)
        return (entry.key, entry.index, data, printed) if data is not None or printed else None

    def _new_saves(self, request_id: str, saves: Callable[[], dict[str, Any]]) -> bytes | None:
        """Return the encoded changes of a request's saved values; None if it streams none, or on an error."""
        deltas = self._deltas.get(request_id)
        if deltas is None:
            return None
        try:
            return deltas.changes_in(saves())
        except Exception:
            logger.exception("the saved values of a block cannot be reported; they are collected at its end")
            del self._deltas[request_id]
            return None

    def close(self, request_id: str, key: str) -> None:
        """Unregister a request; retain the rest of its printed text until it is fetched with the trace."""
        self._deltas.pop(request_id, None)
        prints = self._prints.pop(request_id, None)
        last = "" if prints is None else prints.take_lines(everything=True)
        if last:
            self._remaining[key] = self._remaining.get(key, "") + last

    def fail(self, key: str, failure: str) -> None:
        if failure:
            self._failed[key] = failure

    def take_remaining(self, key: str) -> tuple[str, str]:
        """Return and remove a trace's remaining printed text and the text of its failure."""
        return self._remaining.pop(key, ""), self._failed.pop(key, "")


def _nothing() -> None: ...
