"""Variables shared between invokes: each sees the assignments of earlier ones, as if they ran in sequence.

Invokes run interleaved, so each has cells of its own. A variable that an invoke has not assigned itself has:

- the surrounding code's value at the place where the invoke stands (in a loop, of that iteration), if no
  earlier invoke may assign it;
- otherwise the value that the nearest of those has assigned by now; while it still may and has not, the
  variable is unbound: reading it is a ``NameError``, since the surrounding code's value would be wrong;
- at a barrier, the value that a later invoke that met it there has assigned;
- a later invoke's value without a barrier only if the variable would never get another value.

Once an invoke has assigned or deleted a variable, only the invoke itself changes it. At the end, the
surrounding code gets the value that the last invoke in order of definition assigned.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from types import CellType
from typing import Any, Final, Protocol

from nnsight_engine.core.closure_cells import UNBOUND, Assignments, content
from nnsight_engine.interleaving.events import Events
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator


class Sharer(Protocol):
    """The variables of an invoke; ``stored`` has the names that it may assign.

    Equal ``identities`` of names in two invokes mean the same variable.
    """

    @property
    def identities(self) -> Mapping[str, Hashable]: ...

    @property
    def cells(self) -> Mapping[str, CellType]: ...

    @property
    def stored(self) -> Sequence[str]: ...

    @property
    def assignments(self) -> Assignments: ...


class _VariableCell:
    """An invoke's cell for a variable that some invoke assigns.

    Attributes:
        passed: The value passed on from the invokes before it; ``UNBOUND`` if there is none.
        is_passed: Whether an earlier invoke, not the surrounding code, has assigned (or deleted) that value.
        is_waiting: Whether an earlier invoke may assign the variable and has not yet.
        later: The order of the later invoke whose value the cell holds; None if it holds no such value.
        met: Whether that later invoke was met at a barrier.
    """

    __slots__ = (
        "assigned", "cell", "count", "is_passed", "is_waiting", "later", "may_assign", "met", "order",
        "passed",
    )  # fmt: skip

    def __init__(self, cell: CellType, order: int, *, may_assign: bool) -> None:
        """Note the cell of the invoke at place ``order`` among the invokes."""
        self.cell = cell
        self.order = order
        self.may_assign = may_assign
        self.passed = content(cell)
        self.count = 0
        self.assigned = self.is_passed = self.is_waiting = self.met = False
        self.later: int | None = None

    @property
    def value(self) -> Any:
        return content(self.cell) if self.assigned else self.passed

    def hold(self, value: Any) -> None:
        """Set the cell without counting it as an assignment; ``UNBOUND`` empties it."""
        if value is not UNBOUND:
            self.cell.cell_contents = value
        elif content(self.cell) is not UNBOUND:
            del self.cell.cell_contents


class _Variable:
    """A variable of several invokes; ``readers`` are their cells, in the order of the invokes' definition."""

    __slots__ = ("readers",)

    def __init__(self) -> None:
        self.readers: list[_VariableCell] = []

    def begin(self) -> None:
        """Unbind the variable in all invokes that stand after one that may assign it."""
        is_waiting = False
        for reader in self.readers:
            if is_waiting:
                reader.is_waiting, reader.passed = True, UNBOUND
                reader.hold(UNBOUND)
            is_waiting |= reader.may_assign

    def pass_on(self, source: _VariableCell) -> None:
        """Pass the value of ``source`` to later invokes, up to the next one that assigns the variable."""
        value, position = source.value, self.readers.index(source)
        is_waiting = source.is_waiting and not source.assigned
        is_passed = source.is_passed or source.assigned
        for reader in self.readers[position + 1 :]:
            if reader.assigned:
                break
            reader.passed, reader.is_waiting, reader.is_passed = value, is_waiting, is_passed
            if reader.later is None:
                reader.hold(value)
            if reader.may_assign:
                break
        if source.assigned:
            self._pass_back(source, value, position)

    def _pass_back(self, source: _VariableCell, value: Any, position: int) -> None:
        """Pass the value to earlier invokes in which the variable would never get another one."""
        for reader in self.readers[:position]:
            if reader.assigned or reader.is_waiting or reader.is_passed or reader.met:
                continue
            if reader.later == source.order or (reader.later is None and reader.passed is UNBOUND):
                reader.later = source.order
                reader.hold(value)

    def meet(self, orders: Collection[int]) -> None:
        """Give invokes that met at a barrier the last one's value, if they precede all that have assigned."""
        readers = [reader for reader in self.readers if reader.order in orders]
        assigned = [reader for reader in readers if reader.assigned]
        for reader in readers:
            if not assigned or assigned[0].order <= reader.order:
                return
            reader.later, reader.met = assigned[-1].order, True
            reader.hold(assigned[-1].value)


class Exchange:
    """Publishes the assignments of one invoke each time it hands over."""

    def __init__(self, order: int, sharer: Sharer, variables: Mapping[Hashable, _Variable]) -> None:
        """Watch the variables that the invoke may assign, of those that several invokes have, by identity."""
        self.order = order
        self._total = 0
        self._assignments = sharer.assignments
        self.variables = variables
        self._watched: list[tuple[str, _VariableCell, _Variable]] = []
        for name in sharer.stored:
            variable = variables.get(sharer.identities.get(name))
            if variable is not None:
                own_cell = next(reader for reader in variable.readers if reader.order == order)
                self._watched.append((name, own_cell, variable))

    def publish(self) -> None:
        """Pass on what the invoke has assigned since the last time; called each time it hands over."""
        assignments = self._assignments
        if assignments.total == self._total:
            return
        self._total = assignments.total
        for name, reader, variable in self._watched:
            count = assignments[name]
            if count != reader.count:
                reader.count, reader.assigned = count, True
                variable.pass_on(reader)

    def close(self) -> None:
        """Record the invoke's end: the values of variables that it did not assign are passed on."""
        for _, reader, variable in self._watched:
            reader.may_assign = False
            if not reader.assigned:
                variable.pass_on(reader)


def meet(participants: Sequence[Exchange]) -> None:
    """Let invokes of one trace that meet at a barrier see each other's variables."""
    orders = {participant.order for participant in participants}
    for variable in participants[0].variables.values() if participants else ():
        variable.meet(orders)


def exchanges(sharers: Sequence[Sharer]) -> list[Exchange]:
    """Return an exchange for each invoke; from now on they see each other's assignments."""
    stored = {sharer.identities.get(name) for sharer in sharers for name in sharer.stored}
    variables: dict[Hashable, _Variable] = {identity: _Variable() for identity in stored - {None}}
    for order, sharer in enumerate(sharers):
        for name, identity in sharer.identities.items():
            if identity in variables:
                reader = _VariableCell(sharer.cells[name], order, may_assign=name in sharer.stored)
                variables[identity].readers.append(reader)
    shared = {identity: variable for identity, variable in variables.items() if len(variable.readers) > 1}
    for variable in shared.values():
        variable.begin()
    return [Exchange(order, sharer, shared) for order, sharer in enumerate(sharers)]


def explain(error: NameError, stored: Iterable[Collection[str]]) -> None:
    """Add a remedy to the error if one invoke used a variable that another one had yet to assign."""
    match = _QUOTED.search(str(error))
    name = error.name or (match.group(1) if match is not None else "")
    if not hasattr(error, "__notes__") and any(name in names for names in stored):
        error.add_note(
            f"`{name}` is assigned in another invoke, which had not reached that line yet; a value from "
            "before the trace is not used instead. If both read the same point, let them wait for each "
            "other: barrier = tracer.barrier(2) before the invokes, and barrier() in each, after the "
            "assignment and before the use."
        )


_QUOTED: Final = re.compile(r"'(\w+)'")


class Barrier:
    """Blocks each invoke that calls it until ``participants`` invokes have called it; reusable.

    Invokes that wait for the same point are answered in order of definition. One that uses a value which an
    earlier one reads *at that same point* would evaluate its request before; a barrier blocks it until then.
    """

    def __init__(self, interleaver: Interleaver, participants: int) -> None:
        if participants < 1:
            raise ValueError(f"a barrier needs at least 1 participant, got {participants}")
        self.interleaver = interleaver
        self.participants = participants
        self.arrived: list[Mediator] = []

    def __call__(self) -> None:
        """Wait for the others; ValueError outside an invoke, MissedProviderError if the run ends before."""
        mediator = self.interleaver.current
        if mediator is None:
            raise ValueError("a barrier is called inside an invoke: each of its participants is one")
        mediator.send_event(Events.BARRIER, "", None, self)

    def arrive(self, mediator: Mediator) -> None:
        """Block a mediator; the last one to arrive releases all, in order of definition."""
        self.arrived.append(mediator)
        if len(self.arrived) < self.participants:
            return
        assert mediator.interleaver is not None  # noqa: S101 - it has just asked
        meet([arrived.exchange for arrived in self.arrived if arrived.exchange is not None])
        mediator.interleaver.released.extend(sorted(self.arrived, key=lambda arrived: arrived.idx))
        self.arrived = []

    def unmet(self) -> str:
        """Return the message for invokes that still wait here when the run has ended."""
        return (
            f"Execution complete but a barrier for {self.participants} participants was reached by "
            f"{len(self.arrived)} only: call it in {self.participants} invokes."
        )
