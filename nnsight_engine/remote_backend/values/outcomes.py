"""Outcomes of blocks that ran elsewhere, and their transfer into the user's variables and containers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Mapping, Sequence
from types import CellType
from typing import Any, Final, NamedTuple, Self, TypeVar

from nnsight_engine.core.closure_cells import Assignments, content
from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.saves import SAVES
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.interleaving.shared_variables import explain
from nnsight_engine.remote_backend.errors import LostTraceError
from nnsight_engine.serialization import DATA_ONLY, DecodeError, Policy, SentBlock, decode, restore_error
from nnsight_engine.serialization.graph import Resolve
from nnsight_engine.tracing.frames import users_stacklevel
from nnsight_engine.tracing.tracer import Info

T = TypeVar("T")
_MAX_WARNING: Final = 2000
"""Maximum number of characters of a warning that are shown."""
_MAX_WARNINGS: Final = 32
"""Maximum number of warnings of one block that are shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one block.

    Attributes:
        choice: Index of the choice among the ``n`` of its request.
        shapes: First values of the modules that its request passed through, if they were requested.
        flows: Values that it assigned and did not save, but that later traces of its session use, by name.
    """

    index: int
    choice: int
    saves: dict[str, Any]
    error: BaseException | None
    shapes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    flows: dict[str, Any] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class SentPart(NamedTuple):
    """A block that was sent; for ``identities`` see ``interleaving.shared_variables``."""

    info: Info
    assignments: Assignments
    identities: Mapping[str, Hashable]

    @classmethod
    def alone(cls, info: Info) -> Self:
        """Return a block that uses the surrounding code's own variables."""
        identities = {name: id(cell) for name, cell in info.variables.items()}
        return cls(info, Assignments(info.variables), identities)

    @property
    def cells(self) -> Mapping[str, CellType]:
        return self.assignments.cells

    def bind(self, name: str, value: Any) -> None:
        """Assign one of its variables; ignore unknown names, which a faulty or malicious server may send."""
        if name in self.cells:
            self.assignments[name] = value

    def as_sent(self, left_out: frozenset[str] = frozenset()) -> SentBlock:
        cells = {name: cell for name, cell in self.cells.items() if name not in left_out}
        return SentBlock(self.info, cells, left_out)


def parts_of(tracer: InterleavingTracer) -> list[SentPart]:
    """Return the blocks of a trace: its invokes, or the trace itself if it has an input."""
    if not tracer.invokers:
        return [SentPart.alone(tracer.info)]
    return [SentPart(invoker.info, invoker.assignments, invoker.identities) for invoker in tracer.invokers]


def wanted_of(parts: Sequence[SentPart]) -> list[str]:
    """Return the names whose values must be returned although they were not saved, see ``Info.wanted``."""
    return sorted({name for part in parts for name in part.info.wanted})


def raise_first(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


def warnings_of(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the warnings in a block's outcome, bounded in number and length; older engines send none."""
    texts = block.get("warnings", [])
    if type(texts) is not list or not all(type(text) is str for text in texts):
        raise DecodeError("its warnings are no texts")
    return tuple(text[:_MAX_WARNING] for text in texts[:_MAX_WARNINGS])


def warn_of(outcomes: Sequence[Outcome]) -> None:
    """Issue the blocks' warnings at the user's line, each text once."""
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
    """Return the outcome of each block, and update the ``saved_containers``, unless ``fills`` is false."""
    message = decode(data, resolve=resolve, policy=policy, device=device)
    try:
        before = message["before"] if fills else None
        pairs = [] if before is None else _pairs(before, saved)
        originals = {id(value): original for value, original in pairs}
        outcomes = [_outcome(block, originals) for block in _typed(message["blocks"], list)]
        for value, original in pairs:
            _fill(original, value, originals)
    except (AttributeError, LookupError, TypeError) as error:
        raise DecodeError(f"the message holds no outcome of a trace: {error!r}") from error
    return outcomes


def _outcome(block: dict[str, Any], originals: Mapping[int, Any]) -> Outcome:
    error = block["error"]
    return Outcome(
        index=_typed(block["index"], int),
        choice=_typed(block["choice"], int),
        saves=_named(block["saves"], originals),
        error=None if error is None else restore_error(error),
        shapes=_typed(block["shapes"], dict),
        flows=_named(block.get("flows", {}), originals),
        warnings=warnings_of(block),
    )


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} is wanted, not {type(value).__name__}")
    return value


def _named(values: Any, originals: Mapping[int, Any]) -> dict[str, Any]:
    """Return values by variable, with the user's containers in place of the returned ones."""
    values = _typed(values, dict)
    return {_typed(name, str): originals.get(id(value), value) for name, value in values.items()}


def _pairs(before: Any, saved: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the returned containers with the user's ones that they replace, or raise ``DecodeError``."""
    if len(_typed(before, list)) != len(saved):
        raise DecodeError(f"the message has {len(before)} containers, and {len(saved)} were sent")
    for value, original in zip(before, saved, strict=True):
        if not any(isinstance(value, kind) and isinstance(original, kind) for kind in (list, dict, set)):
            raise DecodeError(f"a {type(original).__name__} that was sent came back as another type")
    return list(zip(before, saved, strict=True))


def assign_saved(parts: Sequence[SentPart], outcomes: Sequence[Outcome]) -> None:
    """Assign saved values and ``flows``; raise the first error or ``LostTraceError``, else issue warnings."""
    for index, part in enumerate(parts):
        of_block = [outcome for outcome in outcomes if outcome.index == index]
        for name, value in by_name([outcome.flows for outcome in of_block]).items():
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
    """Return all saved values by name, the last block's if several have it; raise the first error."""
    raise_first(outcomes)
    warn_of(outcomes)
    saves: dict[str, Any] = {}
    for index in sorted({outcome.index for outcome in outcomes}):
        saves |= saves_of(outcomes, index)
    return saves


def saves_of(outcomes: Sequence[Outcome], index: int) -> dict[str, Any]:
    return by_name([outcome.saves for outcome in outcomes if outcome.index == index])


def by_name(choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a block by name; with several choices, a list with one value per choice."""
    if len(choices) == 1:
        return dict(choices[0])
    names = {name: None for choice in choices for name in choice}
    return {name: [choice.get(name) for choice in choices] for name in names}


def saved_containers(blocks: Sequence[Mapping[str, CellType]]) -> list[Any]:
    contents = [content(cell) for cells in blocks for cell in cells.values()]
    containers = {id(value): value for value in contents if isinstance(value, list | dict | set)}
    return [value for key, value in containers.items() if key in SAVES.marked]


def groups_of(parts: Sequence[SentPart]) -> list[dict[str, int]]:
    """Number the surrounding variables; none spans blocks if ``CONFIG.APP.CROSS_INVOKER`` is off."""
    numbers: dict[tuple[int, Hashable], int] = {}
    shares = CONFIG.APP.CROSS_INVOKER
    return [
        {
            name: numbers.setdefault((0 if shares else index, identity), len(numbers))
            for name, identity in part.identities.items()
        }
        for index, part in enumerate(parts)
    ]


def _fill(original: Any, value: Any, originals: Mapping[int, Any]) -> None:
    """Replace a user's container's contents; ``originals`` are the user's, by ``id`` of the returned ones."""
    if isinstance(original, list):
        original[:] = [originals.get(id(item), item) for item in value]
    elif isinstance(original, dict):
        original.clear()
        original.update({key: originals.get(id(item), item) for key, item in value.items()})
    elif isinstance(original, set):
        original.clear()
        original.update(value)
