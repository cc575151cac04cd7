"""Values become nodes here: each object once, in an order of their own, so that nothing recurses.

An object gets its number when it is first met and is written when its turn comes. So depth costs nothing, and
an object that refers to itself is a node that refers to itself. What each type is written as is said by the
writers (``data_encoding``, ``object_encoding``, ``code_encoding``); ``values`` and ``traces`` call this.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch

from nnsight_engine.serialization.errors import EncodeError
from nnsight_engine.serialization.limits import MessageLimits
from nnsight_engine.serialization.message import Table
from nnsight_engine.serialization.node_kinds import NodeKind

Reference = Callable[[Any], tuple[str, ...] | None]
Writer = Callable[["Encoder", int, Any], None]
_MAX_STEPS_SHOWN = 12
_MAX_KEY_SHOWN = 60
_SHARED_BY_VALUE = frozenset({str, int, bool, type(None)})
_INT64 = range(-(2**63), 2**63)


class Encoder:
    """One message being written.

    Attributes:
        mentioned: Attribute names and strings in the code written so far, which say what of a module to send.
        finishers: Called when all else is written; each may add more, and says whether it did.
    """

    def __init__(self, write: Writer, reference: Reference | None, limits: MessageLimits) -> None:
        """Begin with no nodes; ``write`` writes any object that no other writer was named for."""
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
        """Return the number of the value's node, which is written later if it is new.

        Args:
            value: Any object.
            parent: The node that refers to it.
            step: How to say the way from there, with ``{}`` for ``key``.
            key: Put into ``step`` if an error has to name the path.
            writer: What writes it, if not what its type says.
        """
        kind = type(value)
        if writer is None and kind is float:  # many, and nobody asks whether two are the same
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
            self._kept.append(value)  # its id is to stay its own
            self._turns.append((found, value, write))
        return found

    def emit(
        self, index: int, kind: NodeKind, children: list[int] | None = None, payload: Any = None
    ) -> None:
        """Say what a node is."""
        self._kinds[index] = kind
        self._payloads[index] = payload
        if children:
            self._children[index] = children

    def make_room(self, num_bytes: int) -> None:
        """Count a tensor's bytes, before a contiguous copy of it is made.

        Raises:
            EncodeError: They are too many.
        """
        self._num_tensor_bytes += num_bytes
        if self._num_tensor_bytes > self.limits.max_bytes:
            raise EncodeError(
                f"the tensors have more than the {self.limits.max_bytes:,} bytes that a message may have; "
                "send less at a time"
            )

    def add_tensor(self, segment: torch.Tensor | None) -> str | None:
        """Put a tensor's values into the message; returns the name that its node gives for them."""
        if segment is None:
            return None
        name = str(len(self._tensors))
        self._tensors[name] = segment
        return name

    def run(self) -> None:
        """Write what was met, and what that leads to.

        Raises:
            EncodeError: Some of it cannot travel.
        """
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

    def table(self, root: int) -> Table:
        """Return what was written."""
        return Table(self._kinds, self._children, self._payloads, self._tensors, root)

    def numbers_of(self, ids: Collection[int]) -> list[int]:
        """Return the nodes of those objects met whose ``id`` is one of these."""
        return [number for (identity, _), number in self._known.items() if identity in ids] if ids else []

    def refuse(self, index: int, value: Any, why: str) -> NoReturn:
        """Say that an object cannot travel, where it was found and why.

        Raises:
            EncodeError: Always.
        """
        kind = type(value)
        name = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        if isinstance(value, (type, types.FunctionType)):
            name = f"{name} ({value.__qualname__})"
        raise EncodeError(f"{self.path(index)} cannot be sent: it is of type {name}; {why}")

    def path(self, index: int) -> str:
        """Return the way to a node from the message's root, in words."""
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
    except Exception:  # noqa: BLE001 - a user's own, while an error is being made
        shown = f"<{type(key).__name__}>"
    return shown if len(shown) <= _MAX_KEY_SHOWN else shown[:_MAX_KEY_SHOWN] + "…"


def fits_in_64_bits(value: int) -> bool:
    """Tell whether an integer can be a scalar of the table."""
    return value in _INT64
