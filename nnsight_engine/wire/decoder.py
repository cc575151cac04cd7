"""Nodes become objects here, in an order that keeps identity and cycles, and without recursion.

A node is *made* once what it cannot exist without is made, and *filled* later with what it only refers to: a
list is made empty. Filling comes as early as possible, since a set's members must be able to hash and a
class's body to run; where a cycle is in the way it waits. What does not come to an end was never a message.

Makers (``data_makers``, ``code_makers``) say, for each kind, how many children it is made from, and how.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from nnsight_engine.wire.errors import DecodeError
from nnsight_engine.wire.homes import MOVED
from nnsight_engine.wire.kinds import Kind
from nnsight_engine.wire.limits import Limits, Policy, is_data_class
from nnsight_engine.wire.message import HERE, Table

Resolve = Callable[[tuple[str, ...]], Any]
ALL: Final = -1
_MAX_ROUNDS = 64
_ENTER, _MAKE, _FILL = range(3)
_FILLED_LATER = frozenset({Kind.LIST, Kind.DICT, Kind.SET})


class _Missing:
    """Stands for an object that is not made yet."""


MISSING: Final = _Missing()


_PAYLOAD: Final = object()
_AS_SENT: Final = {Kind.NONE: None, Kind.TRUE: True, Kind.FALSE: False} | dict.fromkeys(
    (Kind.INT, Kind.FLOAT, Kind.STR, Kind.BYTES), _PAYLOAD
)
_READY: Final = [_AS_SENT.get(kind, MISSING) for kind in Kind]
"""For each kind, what needs no making: most nodes are numbers and strings, which their payload is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Maker:
    """How nodes of one kind become objects.

    Attributes:
        make: Called with the decoder, the node and the children it is made from.
        num_first: How many children those are; the rest is for ``fill``.
        fill: Called with the object and the rest once it is made; None if there can be no rest.
        partly: Whether ``fill`` may be called early and again, with ``MISSING`` for what is not made.
        copies: Whether ``fill`` copies what is in the rest, which then has to be filled before.
    """

    make: Callable[[Decoder, int, list[Any]], Any]
    num_first: int = ALL
    fill: Callable[[Decoder, Any, list[Any]], None] | None = None
    partly: bool = False
    copies: bool = False


_NEVER: Final = Maker(lambda _decoder, _index, _parts: MISSING, num_first=0)
"""For kinds that are ready from the start; what they refer to is looked at by nobody."""


class Decoder:
    """One message being read.

    Attributes:
        device: Where tensors go.
        python: Which Python 3 the sender runs; 0 if it did not say.
        depths: How many objects within each other an immutable node is.
        work: How many objects hashing it passes through, for nodes where that is more than one.
        state: What makers share within the message, by their own keys.
    """

    def __init__(
        self,
        table: Table,
        makers: dict[Kind, Maker],
        *,
        resolve: Resolve | None,
        policy: Policy,
        limits: Limits,
        device: torch.device,
    ) -> None:
        """Begin with nothing made."""
        self.resolve = resolve
        self.policy = policy
        self.limits = limits
        self.device = device
        self.tensors = table.tensors
        self.python = table.python
        self.state: dict[Any, Any] = {}
        self.depths: dict[int, int] = {}
        self.work: dict[int, int] = {}
        self._makers = [makers.get(kind) or _NEVER for kind in Kind]
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
        """Return the object that the node ``root`` stands for.

        Raises:
            DecodeError: The message is broken, or asks for what the policy does not allow.
        """
        try:
            self._run(root)
        except DecodeError:
            raise
        except self.policy.rules.stops:
            raise self.policy.rules.told() from None
        except (Exception, RecursionError) as error:
            raise DecodeError(
                f"the message cannot be read: {type(error).__name__}: {error}{self.between_versions}"
            ) from error
        return self._objects[root]

    @property
    def between_versions(self) -> str:
        """What an error says last that may come of another version of Python there than here."""
        if self.python in {0, HERE}:
            return ""
        return f" (sent by Python 3.{self.python}, and this side runs Python 3.{HERE})"

    def made(self, index: int) -> Any:
        """Return the object of a node that was made, or ``MISSING``."""
        return self._objects[index]

    def children(self, index: int) -> Sequence[int]:
        """Return the nodes that a node refers to."""
        return self._children[index]

    def kind(self, index: int) -> int:
        """Return what a node is."""
        return self._kinds[index]

    def payload(self, index: int) -> Any:
        """Return a node's scalar, of the type that its kind has."""
        return self._payloads[index]

    def import_name(self, module: str, name: str) -> Any:
        """Return what an importable module has under a qualified name.

        Raises:
            DecodeError: The policy forbids it, or it is not there.
        """
        module = MOVED.get(module, module)
        if not self.policy.rules.keeps_real_names:
            return self.policy.rules.find(module, name)
        if not self.policy.may_import(module, name):
            raise DecodeError(
                f"the message asks for {module}.{name}, which this side does not take from a message"
            )
        try:
            found = importlib.import_module(module)
        except Exception as error:  # a module may fail in any way
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
            self._stack, self._waiting = self._waiting[::-1], []  # what was put off first comes first
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
        assert maker.fill is not None  # noqa: S101 - only those with one come here
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
