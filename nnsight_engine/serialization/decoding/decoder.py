"""Conversion of nodes to objects, preserving identity and cycles, without recursion.

A node is *made* when the children that it cannot exist without are made, and *filled* later with the children
that it only refers to. Nodes are filled as early as possible, because the members of a set must be hashable
and a class body must be able to run. Without progress, or after too many rounds, the message is malformed.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from nnsight_engine.serialization.limits import DecodeError, MessageLimits, Policy, is_data_class
from nnsight_engine.serialization.message import PYTHON_MINOR, NodeKind, NodeTable
from nnsight_engine.serialization.source.import_resolution import MOVED

Resolve = Callable[[tuple[str, ...]], Any]
ALL: Final = -1
_MAX_ROUNDS = 64
_ENTER, _MAKE, _FILL = range(3)
_FILLED_LATER = frozenset({NodeKind.LIST, NodeKind.DICT, NodeKind.SET})


class _Missing:
    pass


MISSING: Final = _Missing()


_PAYLOAD: Final = object()
_AS_SENT: Final = {NodeKind.NONE: None, NodeKind.TRUE: True, NodeKind.FALSE: False} | dict.fromkeys(
    (NodeKind.INT, NodeKind.FLOAT, NodeKind.STR, NodeKind.BYTES), _PAYLOAD
)
_READY: Final = [_AS_SENT.get(kind, MISSING) for kind in NodeKind]
"""For each kind, the object that needs no making; for most nodes, numbers and strings, it is their
payload."""


@dataclasses.dataclass(frozen=True, slots=True)
class Maker:
    """How nodes of one kind become objects.

    Attributes:
        num_first: Number of the children that ``make`` takes; the remaining ones are passed to ``fill``.
        partly: Whether ``fill`` may be called early and repeatedly, with ``MISSING`` for objects not made.
        copies: Whether ``fill`` copies the contents of the children, which must then be filled before.
    """

    make: Callable[[Decoder, int, list[Any]], Any]
    num_first: int = ALL
    fill: Callable[[Decoder, Any, list[Any]], None] | None = None
    partly: bool = False
    copies: bool = False


_NEVER: Final = Maker(lambda _decoder, _index, _parts: MISSING, num_first=0)
"""For kinds that are ready from the start; their children are never visited."""


class Decoder:
    """Decodes one message.

    Attributes:
        python: Minor version of the sender's Python 3; 0 if unknown.
        work: Number of objects visited when a node is hashed, for nodes where it is more than one.
        state: State that makers share within the message, under their own keys.
    """

    def __init__(
        self,
        table: NodeTable,
        makers: dict[NodeKind, Maker],
        *,
        resolve: Resolve | None,
        policy: Policy,
        limits: MessageLimits,
        device: torch.device,
    ) -> None:
        self.resolve = resolve
        self.policy = policy
        self.limits = limits
        self.device = device
        self.tensors = table.tensors
        self.python = table.python
        self.state: dict[Any, Any] = {}
        self.depths: dict[int, int] = {}
        self.work: dict[int, int] = {}
        self._makers = [makers.get(kind) or _NEVER for kind in NodeKind]
        self._kinds = table.kinds
        self._children = table.children
        self._objects: list[Any] = [
            payload if (ready := _READY[kind]) is _PAYLOAD else ready
            for kind, payload in zip(table.kinds, table.payloads, strict=True)
        ]
        self._filled = bytearray(len(table.kinds))
        self._entered = bytearray(len(table.kinds))
        self._stack: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, int]] = []
        self._num_done = 0
        self._payloads = table.payloads

    def value(self, root: int) -> Any:
        try:
            self._run(root)
        except DecodeError:
            raise
        except (Exception, RecursionError) as error:
            raise DecodeError(
                f"the message cannot be read: {type(error).__name__}: {error}{self.between_versions}"
            ) from error
        return self._objects[root]

    @property
    def between_versions(self) -> str:
        """Suffix for errors that different Python versions of the two sides may explain; may be empty."""
        if self.python in {0, PYTHON_MINOR}:
            return ""
        return f" (sent by Python 3.{self.python}, and this side runs Python 3.{PYTHON_MINOR})"

    def made(self, index: int) -> Any:
        return self._objects[index]

    def children(self, index: int) -> Sequence[int]:
        return self._children[index]

    def kind(self, index: int) -> int:
        return self._kinds[index]

    def payload(self, index: int) -> Any:
        return self._payloads[index]

    def num_sent(self, text_per_item: int) -> int:
        """Return the number of nodes and references; text counts as many short items."""
        texts = sum(len(payload) for payload in self._payloads if isinstance(payload, str | bytes))
        return len(self._kinds) + sum(map(len, self._children)) + texts // text_per_item

    def import_name(self, module: str, name: str) -> Any:
        """Return the object; raise a ``DecodeError`` if it is missing or the policy forbids it."""
        module = MOVED.get(module, module)
        if not self.policy.may_import(module, name):
            raise DecodeError(
                f"the message asks for {module}.{name}, which this side does not take from a message"
            )
        try:
            found = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a module may fail in any way
            raise DecodeError(
                f"the message asks for the module {module}, which cannot be imported here ({error}); install "
                f"it here too, or send it as source with register_by_value{self.between_versions}"
            ) from error
        try:
            value = operator.attrgetter(name)(found) if name else found
        except AttributeError as error:
            raise DecodeError(
                f"the message asks for {module}.{name}, which this side's {module} lacks"
                f"{self.between_versions}"
            ) from error
        if not self.policy.allow_source and not is_data_class(value, module, name):
            raise DecodeError(f"the message asks for {module}.{name}, which is no class of data")
        return value

    def _run(self, root: int) -> None:
        self._stack.append((_ENTER, root))
        for _ in range(_MAX_ROUNDS):
            done = self._num_done
            while self._stack:
                step, index = self._stack.pop()
                if step == _ENTER:
                    self._enter(index)
                elif step == _MAKE:
                    self._make(index)
                else:
                    self._fill(index)
            if not self._waiting:
                return
            if self._num_done == done:
                break
            # Retry deferred nodes in the order in which they were deferred.
            self._stack, self._waiting = self._waiting[::-1], []
            self._entered = bytearray(len(self._entered))
        raise DecodeError("the message is broken: its objects need each other to be made")

    def _enter(self, index: int) -> None:
        if self._objects[index] is not MISSING or self._entered[index]:
            return
        self._entered[index] = 1
        children, first = self._children[index], self._num_first(index)
        self._stack.append((_MAKE, index))
        if first:
            self._stack.extend(
                (_ENTER, child) for child in reversed(children[:first]) if self._objects[child] is MISSING
            )

    def _num_first(self, index: int) -> int:
        first = self._makers[self._kinds[index]].num_first
        return len(self._children[index]) if first == ALL else first

    def _make(self, index: int) -> None:
        if self._objects[index] is not MISSING:
            return
        children, first = self._children[index], self._num_first(index)
        if len(children) < first:
            raise DecodeError(f"the message is broken: a node of kind {self._kinds[index]} lacks parts")
        parts = [self._objects[child] for child in children[:first]]
        if any(part is MISSING for part in parts):
            self._waiting.append((_ENTER, index))
            return
        maker = self._makers[self._kinds[index]]
        if len(children) > first and maker.fill is None:
            raise DecodeError(
                f"the message is broken: a node of kind {self._kinds[index]} has parts too many"
            )
        self._objects[index] = maker.make(self, index, parts)
        self._num_done += 1
        if maker.fill is None:
            self._filled[index] = 1
            return
        self._stack.append((_FILL, index))
        self._stack.extend(
            (_ENTER, child) for child in reversed(children[first:]) if self._objects[child] is MISSING
        )

    def _fill(self, index: int) -> None:
        rest = self._children[index][self._num_first(index) :]
        maker = self._makers[self._kinds[index]]
        assert maker.fill is not None  # noqa: S101 - only nodes whose maker has one are pushed
        parts = [self._objects[child] for child in rest]
        complete = all(part is not MISSING for part in parts) and (
            not maker.copies or all(map(self._is_full, rest))
        )
        if complete or maker.partly:
            maker.fill(self, self._objects[index], parts)
        if complete:
            self._filled[index] = 1
            self._num_done += 1
        else:
            self._waiting.append((_FILL, index))

    def _is_full(self, index: int) -> bool:
        return bool(self._filled[index]) or self._kinds[index] not in _FILLED_LATER
