"""Conversion of values to nodes: each object once, from a work list instead of by recursion.

An object receives its node number when it is first reached and is written later, so cycles are no problem.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Collection
from typing import Any, Generic, NoReturn, TypeVar

import torch

from nnsight_engine.serialization.limits import EncodeError, MessageLimits
from nnsight_engine.serialization.message import NodeKind, NodeTable

Key = TypeVar("Key")
Found = TypeVar("Found")
Reference = Callable[[Any], tuple[str, ...] | None]
Writer = Callable[["Encoder", int, Any], None]
_MAX_STEPS_SHOWN = 12
_MAX_KEY_SHOWN = 60
_SHARED_BY_VALUE = frozenset({str, int, bool, type(None)})
_INT64 = range(-(2**63), 2**63)


class Encoder:
    """Encodes one message.

    Attributes:
        mentioned: Names and strings in the code so far; they select which attributes of a module are sent.
        finishers: Called when everything else is written; each may add nodes, and returns whether it did.
    """

    def __init__(self, write: Writer, reference: Reference | None, limits: MessageLimits) -> None:
        self.limits = limits
        self.mentioned: set[str] = set()
        self.finishers: list[Callable[[], bool]] = []
        self._write = write
        self._reference = reference
        self._kinds: list[int] = []
        self._children: list[list[int]] = []
        self._payloads: list[Any] = []
        self._places: list[tuple[int, str, Any]] = []
        self._known: dict[tuple[int, Writer], int] = {}
        self._scalars: dict[tuple[type, Any], int] = {}
        self._kept: list[Any] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_tensor_bytes = 0
        self._turns: collections.deque[tuple[int, Any, Writer]] = collections.deque()

    def node(
        self, value: Any, parent: int, step: str, key: Any = None, *, writer: Writer | None = None
    ) -> int:
        """Return the index of the value's node; errors show ``step``, with ``{}`` for ``key``."""
        kind = type(value)
        if writer is None and kind is float:  # common, and their identity does not matter
            index = self._reserve(parent, step, key)
            self._write(self, index, value)
            return index
        if writer is None and kind in _SHARED_BY_VALUE:
            found = self._scalars.get((kind, value))
            if found is None:
                found = self._scalars[(kind, value)] = self._reserve(parent, step, key)
                self._write(self, found, value)
            return found
        write = writer if writer is not None else self._write
        found = self._known.get((id(value), write))
        if found is None:
            found = self._known[(id(value), write)] = self._reserve(parent, step, key)
            self._kept.append(value)  # keep it alive, so that its id is not reused
            self._turns.append((found, value, write))
        return found

    def emit(
        self, index: int, kind: NodeKind, children: list[int] | None = None, payload: Any = None
    ) -> None:
        self._kinds[index] = kind
        self._payloads[index] = payload
        if children:
            self._children[index] = children

    def make_room(self, num_bytes: int) -> None:
        """Account for a tensor's bytes before a contiguous copy is made, or raise an ``EncodeError``."""
        self._num_tensor_bytes += num_bytes
        if self._num_tensor_bytes > self.limits.max_bytes:
            raise EncodeError(
                f"the tensors have more than the {self.limits.max_bytes:,} bytes that a message may have; "
                "send less at a time"
            )

    def add_tensor(self, segment: torch.Tensor | None) -> str | None:
        """Add a tensor segment and return its name; return None for an empty segment."""
        if segment is None:
            return None
        name = str(len(self._tensors))
        self._tensors[name] = segment
        return name

    def run(self) -> None:
        again = True
        while again:
            while self._turns:
                index, value, write = self._turns.pop()
                named = self._reference(value) if self._reference is not None else None
                if named is not None:
                    self.emit(
                        index, NodeKind.REFERENCE, [self.node(part, index, "its name") for part in named]
                    )
                else:
                    write(self, index, value)
            again = any([finish() for finish in self.finishers]) or bool(self._turns)  # noqa: C419 - call each

    def table(self, root: int) -> NodeTable:
        return NodeTable(self._kinds, self._children, self._payloads, self._tensors, root)

    def numbers_of(self, ids: Collection[int]) -> list[int]:
        return [number for (identity, _), number in self._known.items() if identity in ids] if ids else []

    def refuse(self, index: int, value: Any, why: str) -> NoReturn:
        kind = type(value)
        name = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        if isinstance(value, (type, types.FunctionType)):
            name = f"{name} ({value.__qualname__})"
        raise EncodeError(f"{self.path(index)} cannot be sent: it is of type {name}; {why}")

    def path(self, index: int) -> str:
        steps: list[str] = []
        while index >= 0:
            index, step, key = self._places[index]
            if step:
                steps.append(step.format(_shown(key)) if "{}" in step else step)
        steps.reverse()
        if len(steps) > _MAX_STEPS_SHOWN:
            half = _MAX_STEPS_SHOWN // 2
            steps = [*steps[:half], "…", *steps[-half:]]
        return ", ".join(steps) or "the value"

    def _reserve(self, parent: int, step: str, key: Any) -> int:
        index = len(self._kinds)
        if index >= self.limits.max_nodes:
            raise EncodeError(
                f"the message would have more than {self.limits.max_nodes:,} objects; make tensors of "
                "lists of numbers"
            )
        self._kinds.append(NodeKind.NONE)
        self._children.append([])
        self._payloads.append(None)
        self._places.append((parent, step, key))
        return index


def _shown(key: Any) -> str:
    if type(key) is str:
        return key
    try:
        shown = repr(key)
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        shown = f"<{type(key).__name__}>"
    return shown if len(shown) <= _MAX_KEY_SHOWN else shown[:_MAX_KEY_SHOWN] + "…"


def fits_in_64_bits(value: int) -> bool:
    return value in _INT64


class IdentityCache(Generic[Key, Found]):
    """A bounded, thread-safe cache of values derived from objects of this process.

    Equal code objects may come from different files, so the key is the identity, and the cache keeps the
    object alive so that its ``id`` is not reused.
    """

    def __init__(self, max_entries: int = 256) -> None:
        self._max_entries = max_entries
        self._entries: collections.OrderedDict[int, tuple[Key, Found]] = collections.OrderedDict()

    def get(self, key: Key) -> Found | None:
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0] is key else None

    def put(self, key: Key, found: Found) -> Found:
        self._entries[id(key)] = (key, found)
        if len(self._entries) > self._max_entries:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._entries.popitem(last=False)
        return found
