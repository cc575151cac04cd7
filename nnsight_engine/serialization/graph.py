"""Conversion of objects to nodes and of nodes to objects: identity and cycles preserved, without recursion.

In writing, an object receives its node's number when it is first reached, and is written later. In reading, a
node is *made* when the children that it cannot exist without are made, and *filled* later with the children
that it only refers to. Nodes are filled as early as possible, because the members of a set must be hashable
and a class body must be able to run. Without progress, or after too many rounds, the message is malformed.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NoReturn

import torch

from nnsight_engine.serialization.limits import DecodeError, EncodeError, MessageLimits, Policy
from nnsight_engine.serialization.message import PAYLOADS, PYTHON_MINOR, NodeKind, NodeTable

Reference = Callable[[Any], tuple[str, ...] | None]
Resolve = Callable[[tuple[str, ...]], Any]
Written = tuple[NodeKind, Any]
"""A node's kind, and its scalar; for kinds without a scalar, the numbers of its children."""
Writer = Callable[["Encoder", Any], Written]
Maker = Callable[["Decoder", Any], Any]
Filler = Callable[["Decoder", Any, list[Any]], None]


MISSING: Final = object()
"""Stands for an object that is not made yet."""
SCALAR: Final = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One kind of node: of which objects it is written, and how they are made of it.

    Attributes:
        types: Objects of exactly these types are written by ``write``.
        bases: So are the instances of these, if their own type is in no other kind's ``types``.
        ready: The object, if there is but one; ``SCALAR`` if the node's scalar is the object.
        make: Returns the object from its scalar, or from the objects of the first children.
        first: The exact type of each of these children, ``object`` for any; None if all children are first.
        fill: Takes the objects of the other children.
        partly: Whether ``fill`` may be called early and repeatedly, with ``MISSING`` for objects not made.
        copies: Whether ``fill`` copies the contents of the children, which must then be filled before.
        is_code: Whether the policy must allow source.
        is_nested: Whether hashing or freeing the object recurses into its parts.
    """

    number: NodeKind
    types: tuple[type, ...] = ()
    write: Writer | None = None
    _: dataclasses.KW_ONLY
    bases: tuple[type, ...] = ()
    ready: Any = MISSING
    make: Maker | None = None
    first: tuple[type, ...] | None = None
    fill: Filler | None = None
    partly: bool = False
    copies: bool = False
    is_code: bool = False
    is_nested: bool = False


class Unsendable(Exception):  # noqa: N818 - the encoder raises an EncodeError with the object's path instead
    """Raised by a writer, with the reason and an alternative."""


_MAX_STEPS_SHOWN: Final = 12
_MAX_KEY_SHOWN: Final = 60
_SHARED_BY_VALUE: Final = frozenset({str, int, bool, type(None)})


class Encoder:
    """Encodes one message.

    Attributes:
        index: The number of the node that is being written, the parent of those that ``node`` returns.
        mentioned: Names and strings in the code so far; they select which attributes of a module are sent.
    """

    def __init__(self, write: Writer, reference: Reference | None, limits: MessageLimits) -> None:
        """Start without nodes; ``_places`` has the parent, step and key of each, for paths in errors."""
        self.limits = limits
        self.index = -1
        self.mentioned: set[str] = set()
        self._write = write
        self._reference = reference
        self._kinds: list[int] = []
        self._children: list[Sequence[int]] = []
        self._payloads: list[Any] = []
        self._places: list[tuple[int, str, Any]] = []
        self._numbers: dict[tuple[int, Writer], int] = {}
        self._scalars: dict[tuple[type, Any], int] = {}
        self._kept_alive: list[Any] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_tensor_bytes = 0
        self._unwritten: list[tuple[int, Any, Writer]] = []
        self._finishers: list[tuple[int, Callable[[], bool]]] = []

    def node(self, value: Any, step: str = "", key: Any = None, *, writer: Writer | None = None) -> int:
        """Return the number of the value's node; errors show ``step``, with ``{}`` for ``key``."""
        if writer is None:
            kind = type(value)
            if kind is float:  # common, and their identity does not matter
                index = self._reserve(step, key)
                self.emit(index, NodeKind.FLOAT, value)
                return index
            if kind in _SHARED_BY_VALUE:
                number = self._scalars.get((kind, value))
                if number is None:
                    number = self._scalars[(kind, value)] = self._reserve(step, key)
                    self.emit(number, *self._write(self, value))
                return number
            writer = self._write
        number = self._numbers.get((id(value), writer))
        if number is None:
            number = self._numbers[(id(value), writer)] = self._reserve(step, key)
            self._kept_alive.append(value)  # keep it alive, so that its id is not reused
            self._unwritten.append((number, value, writer))
        return number

    def nodes(self, values: Collection[Any], step: str = "") -> list[int]:
        return [self.node(value, step) for value in values]

    def emit(self, index: int, kind: NodeKind, content: Any) -> None:
        """Set a reserved node's kind, and its scalar or the numbers of its children."""
        self._kinds[index] = kind
        if kind in PAYLOADS:
            self._payloads[index] = content
        else:
            self._children[index] = content

    def at_the_end(self, finish: Callable[[], bool]) -> None:
        """Call ``finish`` when everything else is written; it may add nodes, and returns whether it did."""
        self._finishers.append((self.index, finish))

    def add_tensor(self, num_bytes: int, segment: Callable[[], torch.Tensor | None]) -> str | None:
        """Return the name of a new tensor segment, None if empty; its size is checked before it is copied."""
        self._num_tensor_bytes += num_bytes
        if self._num_tensor_bytes > self.limits.max_bytes:
            raise EncodeError(
                f"the tensors have more than the {self.limits.max_bytes:,} bytes that a message may have; "
                "send less at a time"
            )
        added = segment()
        if added is None:
            return None
        name = str(len(self._tensors))
        self._tensors[name] = added
        return name

    def table(self) -> NodeTable:
        """Write everything that was reached, and return the nodes; the first is the root."""
        again = True
        while again:
            while self._unwritten:
                self._write_next()
            again = False
            for index, finish in self._finishers:
                self.index = index
                again |= finish()
            again |= bool(self._unwritten)
        return NodeTable(self._kinds, self._children, self._payloads, self._tensors)

    def _write_next(self) -> None:
        """Write the node that was reached last; an object that the other side has becomes a reference."""
        self.index, value, write = self._unwritten.pop()
        name_parts = self._reference(value) if self._reference is not None else None
        if name_parts is not None:
            self.emit(self.index, NodeKind.REFERENCE, self.nodes(name_parts, "its name"))
            return
        try:
            self.emit(self.index, *write(self, value))
        except Unsendable as error:
            self._refuse(value, error)

    def numbers_of(self, ids: Collection[int]) -> set[int]:
        """Return the numbers of the nodes of objects, by the ids of these."""
        return (
            {number for (identity, _), number in self._numbers.items() if identity in ids} if ids else set()
        )

    def _refuse(self, value: Any, reason: Unsendable) -> NoReturn:
        """Raise an EncodeError with the path and the type of the object, and the reason."""
        kind = type(value)
        name = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        if isinstance(value, (type, types.FunctionType)):
            name = f"{name} ({value.__qualname__})"
        raise EncodeError(
            f"{self._path()} cannot be sent: it is of type {name}; {reason}"
        ) from reason.__cause__

    def _path(self) -> str:
        """Return the steps from the root to the node that is being written; a long path is shortened."""
        steps: list[str] = []
        index = self.index
        while index >= 0:
            index, step, key = self._places[index]
            if step:
                steps.append(step.format(_shown(key)) if "{}" in step else step)
        steps.reverse()
        if len(steps) > _MAX_STEPS_SHOWN:
            half = _MAX_STEPS_SHOWN // 2
            steps = [*steps[:half], "…", *steps[-half:]]
        return ", ".join(steps) or "the value"

    def _reserve(self, step: str, key: Any) -> int:
        """Return the number of a new node, a child of the one being written; errors' paths show ``step``."""
        index = len(self._kinds)
        if index >= self.limits.max_nodes:
            raise EncodeError(
                f"the message would have more than {self.limits.max_nodes:,} objects; make tensors of "
                "lists of numbers"
            )
        self._kinds.append(NodeKind.NONE)
        self._children.append(())
        self._payloads.append(None)
        self._places.append((self.index, step, key))
        return index


def _shown(key: Any) -> str:
    if type(key) is str:
        return key
    try:
        shown = repr(key)
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        shown = f"<{type(key).__name__}>"
    return shown if len(shown) <= _MAX_KEY_SHOWN else shown[:_MAX_KEY_SHOWN] + "…"


_ALL: Final = -1
_MAX_ROUNDS: Final = 64
_ENTER, _MAKE, _FILL = range(3)
_FILLED_LATER: Final = frozenset({NodeKind.LIST, NodeKind.DICT, NodeKind.SET})


class Decoder:
    """Decodes one message; ``kinds`` has each kind at its number.

    Attributes:
        index: The number of the node that is being made or filled.
        depths: Nesting depth of nodes whose kind is nested.
        work: Number of objects visited when a node is hashed, for nodes where it is more than one.
        state: State that makers share within the message, under their own keys.
    """

    def __init__(
        self,
        table: NodeTable,
        kinds: Sequence[Kind],
        *,
        resolve: Resolve | None,
        policy: Policy,
        limits: MessageLimits,
        device: torch.device,
    ) -> None:
        """Start with the objects that are ready, such as scalars; the others are ``MISSING`` until made."""
        self.resolve = resolve
        self.policy = policy
        self.limits = limits
        self.device = device
        self.table = table
        self.index = table.root
        self.state: dict[Any, Any] = {}
        self.depths: dict[int, int] = {}
        self.work: dict[int, int] = {}
        self._all_kinds = kinds
        self._nums_first = [_num_first(kind) for kind in kinds]
        self._objects: list[Any] = [
            payload if (ready := kinds[kind].ready) is SCALAR else ready
            for kind, payload in zip(table.kinds, table.payloads, strict=True)
        ]
        self._filled = bytearray(len(table.kinds))
        self._entered = bytearray(len(table.kinds))
        self._stack: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, int]] = []
        self._num_done = 0

    def value(self) -> Any:
        """Return the root's object, with all that it refers to; any failure is a DecodeError."""
        root = self.table.root
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
        if self.table.python in {0, PYTHON_MINOR}:
            return ""
        return f" (sent by Python 3.{self.table.python}, and this side runs Python 3.{PYTHON_MINOR})"

    @property
    def kind(self) -> int:
        return self.table.kinds[self.index]

    @property
    def children(self) -> Sequence[int]:
        return self.table.children[self.index]

    def _run(self, root: int) -> None:
        """Make and fill the root and what it refers to; deferred nodes are tried again in the next round."""
        self._stack.append((_ENTER, root))
        for _ in range(_MAX_ROUNDS):
            num_done_before = self._num_done
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
            if self._num_done == num_done_before:
                break
            # Retry deferred nodes in the order in which they were deferred.
            self._stack, self._waiting = self._waiting[::-1], []
            self._entered = bytearray(len(self._entered))
        raise DecodeError("the message is broken: its objects need each other to be made")

    def _enter(self, index: int) -> None:
        """Schedule a node to be made, after the children that it is made from."""
        if self._objects[index] is not MISSING or self._entered[index]:
            return
        self._entered[index] = 1
        self._stack.append((_MAKE, index))
        self._enter_all(self.table.children[index][: self._num_first(index)])

    def _enter_all(self, children: Sequence[int]) -> None:
        self._stack.extend((_ENTER, child) for child in reversed(children) if self._objects[child] is MISSING)

    def _num_first(self, index: int) -> int:
        """Return how many children a node is made from; it is filled with the others."""
        num_first = self._nums_first[self.table.kinds[index]]
        return len(self.table.children[index]) if num_first == _ALL else num_first

    def _make(self, index: int) -> None:
        """Make a node and schedule its filling; defer it if it needs an object that is not made yet."""
        if self._objects[index] is not MISSING:
            return
        kind = self._all_kinds[self.table.kinds[index]]
        children, num_first = self.table.children[index], self._num_first(index)
        if len(children) < num_first:
            raise DecodeError(f"the message is broken: a node of kind {kind.number} lacks parts")
        parts = [self._objects[child] for child in children[:num_first]]
        if any(part is MISSING for part in parts):
            self._waiting.append((_ENTER, index))
            return
        if len(children) > num_first and kind.fill is None:
            raise DecodeError(f"the message is broken: a node of kind {kind.number} has parts too many")
        self.index = index
        self._objects[index] = self._make_checked(kind, parts)
        self._num_done += 1
        if kind.fill is None:
            self._filled[index] = 1
            return
        self._stack.append((_FILL, index))
        self._enter_all(children[num_first:])

    def _make_checked(self, kind: Kind, parts: list[Any]) -> Any:
        """Make a node's object, after a check of the policy and of its first children's types."""
        if kind.is_code and not self.policy.allow_source:
            raise DecodeError("the message holds code, and this side takes data alone")
        for part, expected in zip(parts, kind.first or (), strict=False):
            if expected is not object:
                typed(part, expected)
        if kind.is_nested:
            self._record_depth()
        assert kind.make is not None  # noqa: S101 - objects of other kinds are ready
        return kind.make(self, self.table.payloads[self.index] if kind.number in PAYLOADS else parts)

    def _record_depth(self) -> None:
        """Record the depth and hashing work of a nested node; hashing and freeing take C stack by depth."""
        index, children, depths = self.index, self.children, self.depths
        depths[index] = depth = 1 + max((depths.get(child, 0) for child in children), default=0)
        work = 1 + sum(self.work.get(child, 1) for child in children)
        self.work[index] = min(work, self.limits.max_key_work + 1)  # the work doubles with each (t, t)
        if depth > self.limits.max_key_depth and self.kind not in {NodeKind.TUPLE, NodeKind.FROZENSET}:
            raise DecodeError(f"an object is {depth} others deep and may be {self.limits.max_key_depth}")

    def _fill(self, index: int) -> None:
        """Fill a node with the children that it refers to; defer it while some of these are not ready.

        Some kinds take parts as they come (``partly``), some need the parts to be filled before (``copies``).
        """
        kind = self._all_kinds[self.table.kinds[index]]
        other_children = self.table.children[index][self._num_first(index) :]
        assert kind.fill is not None  # noqa: S101 - only nodes whose kind has one are pushed
        parts = [self._objects[child] for child in other_children]
        complete = all(part is not MISSING for part in parts) and (
            not kind.copies or all(map(self._is_full, other_children))
        )
        if complete or kind.partly:
            self.index = index
            kind.fill(self, self._objects[index], parts)
        if complete:
            self._filled[index] = 1
            self._num_done += 1
        else:
            self._waiting.append((_FILL, index))

    def _is_full(self, index: int) -> bool:
        return bool(self._filled[index]) or self.table.kinds[index] not in _FILLED_LATER


def _num_first(kind: Kind) -> int:
    if kind.ready is not MISSING or kind.number in PAYLOADS:
        return 0
    return _ALL if kind.first is None else len(kind.first)


def of_parts(function: Callable[..., Any]) -> Maker:
    return lambda _decoder, parts: function(*parts)


def of_content(function: Callable[[Any], Any]) -> Maker:
    """Return a maker that calls the function with the scalar, or with the list of parts."""
    return lambda _decoder, content: function(content)


def typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise DecodeError(f"the message is broken: {kind.__name__} is wanted, not {type(value).__name__}")
    return value
