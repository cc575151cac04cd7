"""Results of a step for its requests, and their encoding on the way to the API process.

The worker creates records; the scheduler process holds them until an output is sent (``outbox``); the API
process assembles them. Tensors travel as their little-endian content.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from nnsight_engine.core.dtypes import LARGEST
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, PlannedSite


class StepRecord(msgspec.Struct, array_like=True):
    """Values of one read operation from one step, at absolute, ascending positions.

    Attributes:
        parts: Tensor contents. Capture: one part per width among its sites, ``[rows, sites,
            width]``, reduced ``[sites, width]`` (a mean travels as its float32 sum), and if values
            may overflow one part ``[rows, sites]``, 1 for a row with a number beyond the dtype. Probe:
            float32 ``[rows, sites]``. Lens: ids int32 and log-probabilities float32 ``[rows,
            sites, top_k]``, then log-probabilities float32 and ranks int32 of the targets
            ``[rows, sites, targets]``. Patterns: one part ``[sites, rows, heads,
            keys]``, reduced ``[sites, heads, keys]``, whose keys are those of the last position.
            Features: activations float32 ``[rows, features]``, of the most active ids int32 before them.
    """

    op: int
    positions: list[int]
    parts: list[bytes]


def reduced_rows(rows: npt.NDArray[Any], reduce: str) -> npt.NDArray[Any]:
    """Return the rows, or one row without the first axis: their float32 sum for a mean, or the last."""
    if reduce == "mean":
        # The buffer of a mean is float32, whatever dtype it is returned in.
        total: npt.NDArray[Any] = rows.sum(axis=0, dtype=np.float32)
        return total
    return rows[-1] if reduce == "last" else rows


def width_classes(op: PlannedOp, spec: ModelSpec) -> list[list[int]]:
    """Return the indices of the op's sites by width, in order of first appearance; each has a buffer."""
    if op.kind is OperationKind.PROBE:
        return [list(range(len(op.sites)))]
    classes: dict[int, list[int]] = {}
    for index, site in enumerate(op.sites):
        classes.setdefault(leaf_width(site, spec), []).append(index)
    return list(classes.values())


def may_overflow(op: PlannedOp, spec: ModelSpec) -> bool:
    """Return whether captured values may exceed the capture's dtype; each row then has a flag per site."""
    if (
        op.kind is not OperationKind.CAPTURE
        or op.reduce == "mean"
        or op.captures_patterns
        or op.dtype not in LARGEST
    ):
        return False
    # A state is float32 in many models of a narrower dtype.
    dtype = "float32" if op.captures_states else spec.dtype
    return LARGEST[op.dtype] < LARGEST[dtype]


def leaf_width(site: PlannedSite, spec: ModelSpec) -> int:
    """Return the flattened width of a site's value; raise InterventionError if the model lacks the site."""
    leaf = spec.leaf(site.leaf, site.layer)
    if leaf is None:
        raise InterventionError("unknown_point", f"the model has no point {site}")
    return leaf.width


NUMBER_TEXT_BYTES: Final = 20
OBJECT_TEXT_BYTES: Final = 60
"""About the size of a number, and of a token or a feature with its number, as JSON."""


def text_row_bytes(op: PlannedOp) -> int:
    """Return the approximate bytes of JSON of what an operation reads at a position."""
    match op.kind:
        case OperationKind.LENS:
            return len(op.sites) * (op.top_k + len(op.targets)) * OBJECT_TEXT_BYTES
        case OperationKind.FEATURES if op.features is not None:
            return (op.features.top_k or len(op.features.ids)) * OBJECT_TEXT_BYTES
        case OperationKind.PROBE | OperationKind.DETECT:
            return len(op.sites) * NUMBER_TEXT_BYTES
        case _:
            return 0


def feature_row_bytes(op: PlannedOp) -> int:
    if op.features is None:
        return 0
    # An activation is a float32, beside it the most active ones have their ids, int32.
    return 8 * op.features.top_k if op.features.top_k else 4 * len(op.features.ids)


class StepInfo(msgspec.Struct, array_like=True):
    """The worker's progress on a request.

    Positions before ``first_position`` came from the prefix cache. ``tier`` is ``eager`` once a step ran with
    hooks, else ``graph`` if all steps behind the prompt ran in one CUDA graph, else ``tap``. ``spent_s`` is
    the request's share of its steps' seconds. ``refused_rows`` are of refused drafts, or lie behind a stop.
    """

    first_position: int
    end_position: int
    recomputed_tokens: int
    tier: str
    spent_s: float = 0.0
    drafted_rows: int = 0
    refused_rows: int = 0


class Failure(msgspec.Struct, array_like=True):
    code: str
    message: str


class Payload(msgspec.Struct, array_like=True):
    records: list[StepRecord]
    info: StepInfo | None = None
    failure: Failure | None = None

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> Payload:
        return _DECODER.decode(data)


@dataclasses.dataclass(slots=True)
class StreakGroup:
    """Reads that are the same in each step of a streak; ``members``: request id and operation of each row."""

    reduce: str
    members: list[tuple[str, int]]


@dataclasses.dataclass(slots=True)
class StreakOpening:
    """The participants of a streak, sent with its first step; the one before sent each ``StepInfo``."""

    request_ids: list[str]
    groups: list[StreakGroup]


@dataclasses.dataclass(slots=True)
class StreakStep:
    """A step that repeats the work of the step before, one position further, for all its requests.

    ``num_steps`` includes this one; ``point_s`` are the seconds that they took, per point at which a
    request's operations act. ``parts`` has for each group the parts of a record, a row for each member.
    """

    num_steps: int
    point_s: float
    parts: list[list[bytes]]
    opening: StreakOpening | None = None


class DraftedRows(NamedTuple):
    """Rows of a request that has (had) drafts, unreduced; ``start`` is a bound until these are judged."""

    start: int
    num_rows: int
    num_drafts: int

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of rows that count, if the step has yielded ``num_tokens`` tokens.

        The first row that is no part of a prompt always counts: its token was yielded by an earlier step.
        """
        if not self.num_drafts:
            return self.num_rows
        return self.num_rows - self.num_drafts - 1 + max(1, num_tokens)


@dataclasses.dataclass(slots=True)
class StepResults:
    records: dict[str, list[StepRecord]]
    infos: dict[str, StepInfo]
    failures: dict[str, Failure]
    run_step: StreakStep | None = None
    """Replaces records and infos in a step of a streak."""
    stopped: list[str] = dataclasses.field(default_factory=list)
    """Requests of which an operation of kind ``stop`` ends the answer; the step's sample is no part of it."""
    drafted: dict[str, DraftedRows] = dataclasses.field(default_factory=dict)
    """The rows of requests that have drafts, or have had some."""
    ended: list[str] = dataclasses.field(default_factory=list)
    """Traced requests whose blocks failed or ended the request."""
    reports: dict[str, tuple[str, int, bytes | None, str]] = dataclasses.field(default_factory=dict)
    """Events of watched traced requests: trace, block, newly saved values, printed text."""
    undone: list[str] = dataclasses.field(default_factory=list)
    """Requests whose rows of the step are discarded: the step ran without their blocks."""
    waiting: frozenset[str] | None = None
    """Requests that cannot continue before their blocks have answered; None if unchanged."""
    throttled: frozenset[str] | None = None
    """Tenants whose sandboxed requests must not be scheduled now; None if unchanged."""

    def add_reports(self, other: StepResults) -> None:
        """Add what traces of the same step report."""
        self.ended.extend(other.ended)
        self.reports.update(other.reports)
        self.undone.extend(other.undone)
        self.waiting, self.throttled = other.waiting, other.throttled


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Payload)
