"""What a step hands back for one request, and how it travels to the API process.

The worker makes records each step; the scheduler process holds them until an output leaves
for that request, folding reductions as it goes; the API process assembles them. Everything
is bytes and numbers: tensors travel as their little-endian content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from nnsight_engine.plans.request_plan import PlannedOp, RequestPlan


class StepRecord(msgspec.Struct, array_like=True):
    """One read operation's values from one step.

    Attributes:
        op: Index into the plan's operations.
        positions: Absolute positions, ascending.
        parts: Tensor contents. Capture: for each width among its sites one part ``[rows, sites,
            width]``, reduced ``[sites, width]`` (a mean travels as its float32 sum). Probe:
            float32 ``[rows, sites]``. Lens: ids int32 and log-probabilities float32 ``[rows,
            sites, top_k]``, then log-probabilities float32 and ranks int32 of the targets
            ``[rows, sites, targets]``. Patterns: one part ``[sites, rows, heads,
            keys]``, reduced ``[sites, heads, keys]``, whose keys are those of the last position.
    """

    op: int
    positions: list[int]
    parts: list[bytes]


class StepInfo(msgspec.Struct, array_like=True):
    """What the worker did for a request so far.

    Attributes:
        first_position: First position computed; those below came out of the prefix cache.
        end_position: One past the last position computed.
        recomputed_tokens: Positions computed again after a preemption.
        tier: ``tap`` while the compiled step sufficed, ``eager`` once a step ran with hooks.
        spent_s: The request's part of the seconds that all operations of its steps took.
    """

    first_position: int
    end_position: int
    recomputed_tokens: int
    tier: str
    spent_s: float = 0.0


class Failure(msgspec.Struct, array_like=True):
    """Why the request failed: an error code and a message."""

    code: str
    message: str


class Payload(msgspec.Struct, array_like=True):
    """What leaves the engine process with one of the request's outputs."""

    records: list[StepRecord]
    info: StepInfo | None = None
    failure: Failure | None = None

    def encode(self) -> bytes:
        """Return the payload as msgpack."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> Payload:
        """Read what ``encode`` wrote."""
        return _DECODER.decode(data)


@dataclasses.dataclass(slots=True)
class StepResults:
    """Everything one step produced, by vLLM's request id; rides on the runner's output."""

    records: dict[str, list[StepRecord]]
    infos: dict[str, StepInfo]
    failures: dict[str, Failure]
    ended: list[str] = dataclasses.field(default_factory=list)
    """Traced requests whose blocks failed or stopped them."""
    news: dict[str, tuple[str, int, bytes | None, str]] = dataclasses.field(default_factory=dict)
    """What the blocks of traced requests that are watched tell: trace, block, what is newly saved, prints."""


class PendingResults:
    """One request's records between the worker and the next output that leaves for it.

    Reductions are folded here, so that a long generation holds one row, not one per token.

    Args:
        plan: The request's plan.
        stops_outside: Whether the API process may end the request by itself, at a stop string:
            no output is then known to be the last, so each carries all that is known.
    """

    def __init__(self, plan: RequestPlan, *, stops_outside: bool) -> None:
        """Start with nothing to send."""
        self._plan = plan
        self._stops_outside = stops_outside
        self._records: list[StepRecord] = []
        self._reduced: dict[int, StepRecord] = {}
        self._info: StepInfo | None = None
        self._failure: Failure | None = None

    def absorb(self, records: Sequence[StepRecord], info: StepInfo | None, failure: Failure | None) -> None:
        """Take over one step's records."""
        for record in records:
            op = self._plan.ops[record.op]
            if op.reduce == "none":
                self._records.append(record)
            else:
                self._fold(op, record)
        self._info = info or self._info
        self._failure = failure or self._failure

    def _fold(self, op: PlannedOp, record: StepRecord) -> None:
        held = self._reduced.get(record.op)
        if held is None or op.reduce == "last":
            self._reduced[record.op] = record
            return
        held.parts = [
            (np.frombuffer(total, np.float32) + np.frombuffer(part, np.float32)).tobytes()
            for total, part in zip(held.parts, record.parts, strict=True)
        ]
        held.positions.extend(record.positions)

    def take(self, *, final: bool) -> Payload | None:
        """Return what should leave now and forget it; None while nothing should.

        A request that does not stream hands over everything with its last output, a streaming
        one what it has with each, its reductions with the last.
        """
        complete = final or self._stops_outside
        if not complete and not (self._plan.stream and self._records):
            return None
        records, self._records = self._records, []
        if complete:
            # Reductions stay: a later output carries the whole of them again.
            records.extend(self._reduced.values())
        return Payload(records=records, info=self._info, failure=self._failure)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Payload)
