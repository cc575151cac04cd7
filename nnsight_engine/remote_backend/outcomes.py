"""What came of blocks that ran elsewhere, and how it gets into the user's variables.

Whatever runs blocks for somebody else, vLLM's workers or a server, answers with one message: for each block
what it saved and what it raised, and what the blocks left in containers that had been saved before. Here it
is read and brought home.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Mapping, Sequence
from types import CellType
from typing import Any, Final, NamedTuple, Self

from nnsight_engine.core.closure_cells import Assignments, content
from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.saves import SAVES
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.interleaving.shared_variables import explain
from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.serialization import DATA_ONLY, DecodeError, Policy, SentBlock, decode, restore_error
from nnsight_engine.serialization.decoder import Resolve
from nnsight_engine.tracing.tracebacks import users_stacklevel
from nnsight_engine.tracing.tracer import Info

_MAX_WARNING: Final = 2000
"""Characters of a warning that are shown."""
_MAX_WARNINGS: Final = 32
"""Warnings of one block that are shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one block.

    Attributes:
        index: The block, in order of definition.
        choice: Which of its request's ``n``.
        saves: What was saved, by name.
        error: What it raised.
        shapes: First values of the modules that its request passed, if they were asked for.
        flows: What it assigned and did not save, and later traces of its session use, by name.
        warnings: What its author is to be warned of.
    """

    index: int
    choice: int
    saves: dict[str, Any]
    error: BaseException | None
    shapes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    flows: dict[str, Any] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class SentPart(NamedTuple):
    """A block that was sent.

    Attributes:
        info: The block.
        assignments: Its variables.
        identities: Which variables of the surrounding code they stand for; see ``interleaving.sharing``.
    """

    info: Info
    assignments: Assignments
    identities: Mapping[str, Hashable]

    @classmethod
    def alone(cls, info: Info) -> Self:
        """Return a block that runs on the surrounding code's own variables."""
        identities = {name: id(cell) for name, cell in info.variables.items()}
        return cls(info, Assignments(info.variables), identities)

    @property
    def own(self) -> Mapping[str, CellType]:
        """Its variables, by name."""
        return self.assignments.cells

    def bind(self, name: str, value: Any) -> None:
        """Assign one of its variables; a name that it does not have is somebody's mistake or malice."""
        if name in self.own:
            self.assignments[name] = value

    def as_sent(self, left_out: frozenset[str] = frozenset()) -> SentBlock:
        """Return what of it travels, without the values of some names."""
        cells = {name: cell for name, cell in self.own.items() if name not in left_out}
        return SentBlock(self.info, cells, left_out)


def parts_of(tracer: InterleavingTracer) -> list[SentPart]:
    """Return the blocks of a trace: its invokes, or the trace itself if it has an input."""
    if not tracer.invokers:
        return [SentPart.alone(tracer.info)]
    return [SentPart(invoker.info, invoker.assignments, invoker.identities) for invoker in tracer.invokers]


def wanted_of(parts: Sequence[SentPart]) -> list[str]:
    """Return the names that are to come home although nobody saved them, see ``Info.wanted``."""
    return sorted({name for part in parts for name in part.info.wanted})


def raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise what a block raised, the first one's."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


def warnings_of(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the warnings in what came of a block; older engines send none.

    Raises:
        DecodeError: They are no texts.
    """
    said = block.get("warnings", [])
    if type(said) is not list or not all(type(one) is str for one in said):
        raise DecodeError("its warnings are no texts")
    return tuple(one[:_MAX_WARNING] for one in said[:_MAX_WARNINGS])


def warn_of(outcomes: Sequence[Outcome]) -> None:
    """Raise the blocks' warnings at the user's line, each text once."""
    for message in dict.fromkeys(message for outcome in outcomes for message in outcome.warnings):
        warnings.warn(message, stacklevel=users_stacklevel())


def read_outcomes(
    data: bytes | bytearray | memoryview,
    saved: Sequence[Any],
    *,
    resolve: Resolve | None = None,
    policy: Policy = DATA_ONLY,
    device: str = "cpu",
    fills: bool = True,
) -> list[Outcome]:
    """Return what came of each block, and fill the containers that were saved before they ran.

    Args:
        data: What was collected, from whoever ran the blocks.
        saved: The containers, as ``saved_containers`` gave them.
        resolve: Gives what is named and not sent.
        policy: What the message may import.
        device: Where tensors go.
        fills: Whether containers are filled.

    Raises:
        DecodeError: It is no such message.
    """
    message = decode(data, resolve=resolve, policy=policy, device=device)
    if not isinstance(message, dict) or not isinstance(message.get("blocks"), list):
        raise DecodeError("the message holds no outcome of a trace")
    own: dict[int, Any] = {}
    if message["before"] is not None and fills:
        pairs = list(zip(message["before"], saved, strict=True))
        own = {id(value): original for value, original in pairs}
        for value, original in pairs:
            _fill(original, value, own)
    return [
        Outcome(
            index=block["index"],
            choice=block["choice"],
            saves={name: own.get(id(value), value) for name, value in block["saves"].items()},
            error=None if block["error"] is None else restore_error(block["error"]),
            shapes=block["shapes"],
            flows={name: own.get(id(value), value) for name, value in block.get("flows", {}).items()},
            warnings=warnings_of(block),
        )
        for block in message["blocks"]
    ]


def bring_home(parts: Sequence[SentPart], outcomes: Sequence[Outcome]) -> None:
    """Put what the blocks saved where they were written.

    Raises:
        BaseException: What a block raised, the first one's.
        LostTraceError: There is nothing of a block.
    """
    for index, part in enumerate(parts):
        mine = [outcome for outcome in outcomes if outcome.index == index]
        for name, value in by_name([outcome.flows for outcome in mine]).items():
            part.bind(name, value)
        for name, value in saves_of(outcomes, index).items():
            part.bind(name, value)
            SAVES.mark(value)
    for outcome in outcomes:
        if len(parts) > 1 and isinstance(outcome.error, NameError):
            explain(outcome.error, [part.info.block.stored for part in parts])
    raise_first(outcomes)
    missing = set(range(len(parts))) - {outcome.index for outcome in outcomes}
    if missing:
        raise LostTraceError.of(missing)
    warn_of(outcomes)


def named(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return everything that was saved, by name, the last block's where several have one of a name.

    Raises:
        BaseException: What a block raised, the first one's.
    """
    raise_first(outcomes)
    warn_of(outcomes)
    found: dict[str, Any] = {}
    for index in sorted({outcome.index for outcome in outcomes}):
        found |= saves_of(outcomes, index)
    return found


def saves_of(outcomes: Sequence[Outcome], index: int) -> dict[str, Any]:
    """Return what one block saved, by name; see ``by_name``."""
    return by_name([outcome.saves for outcome in outcomes if outcome.index == index])


def by_name(choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a block saved, by name; with several choices, each name has a list of theirs."""
    if len(choices) == 1:
        return dict(choices[0])
    names = {name: None for choice in choices for name in choice}
    return {name: [choice.get(name) for choice in choices] for name in names}


def saved_containers(blocks: Sequence[Mapping[str, CellType]]) -> list[Any]:
    """Return the containers that blocks may fill and that were saved before; each once."""
    contents = [content(cell) for cells in blocks for cell in cells.values()]
    found = {id(value): value for value in contents if isinstance(value, list | dict | set)}
    return [value for key, value in found.items() if key in SAVES.marked]


def groups_of(parts: Sequence[SentPart]) -> list[dict[str, int]]:
    """Number the surrounding variables: the same one has the same number in every block.

    Where blocks are not to see each other's variables, see ``CONFIG.APP.CROSS_INVOKER``, none is the same.
    """
    numbers: dict[tuple[int, Hashable], int] = {}
    shares = CONFIG.APP.CROSS_INVOKER
    return [
        {
            name: numbers.setdefault((0 if shares else index, identity), len(numbers))
            for name, identity in part.identities.items()
        }
        for index, part in enumerate(parts)
    ]


def _fill(original: Any, value: Any, own: Mapping[int, Any]) -> None:
    """Let a container that was saved before the blocks ran hold what they have left in it.

    Args:
        original: The container.
        value: What came back of it.
        own: The user's own containers, by the identity of what came back of them.
    """
    if isinstance(original, list):
        original[:] = [own.get(id(item), item) for item in value]
    elif isinstance(original, dict):
        original.clear()
        original.update({key: own.get(id(item), item) for key, item in value.items()})
    elif isinstance(original, set):
        original.clear()
        original.update(value)
