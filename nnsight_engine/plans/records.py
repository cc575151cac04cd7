"""What a step hands back for one request, and how it travels to the API process.

The worker makes records each step; the scheduler process holds them until an output leaves
for that request, folding reductions as it goes (``outbox``); the API process assembles them. Everything
is bytes and numbers: tensors travel as their little-endian content.

Steps that repeat the one before make a run: they tell of all their requests at once, and what each has come
to is worked out when it is wanted.
"""

from __future__ import annotations

import dataclasses

import msgspec


class StepRecord(msgspec.Struct, array_like=True):
    """One read operation's values from one step.

    Attributes:
        op: Index into the plan's operations.
        positions: Absolute positions, ascending.
        parts: Tensor contents. Capture: for each width among its sites one part ``[rows, sites,
            width]``, reduced ``[sites, width]`` (a mean travels as its float32 sum), and where
            they may overflow one part ``[rows, sites]``, 1 for a row with a number beyond the dtype. Probe:
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
class RunGroup:
    """Reads that are alike in every step of a run.

    Attributes:
        reduce: How: ``none``, ``mean`` or ``last``.
        members: Whose row each of a part's is: request id and index of the operation.
    """

    reduce: str
    members: list[tuple[str, int]]


@dataclasses.dataclass(slots=True)
class RunOpening:
    """Who takes part in a run, sent with its first step: each had its own ``StepInfo`` in the step before."""

    request_ids: list[str]
    groups: list[RunGroup]


@dataclasses.dataclass(slots=True)
class RunStep:
    """A step in which everybody did what they did in the step before, one position further.

    Attributes:
        num_steps: How many of the run there are, this one included.
        point_s: Seconds that they took, for each point at which a request's operations act.
        parts: What was read in this one: for each group the parts of a record, with a row for each member.
        opening: With the first step.
    """

    num_steps: int
    point_s: float
    parts: list[list[bytes]]
    opening: RunOpening | None = None


@dataclasses.dataclass(slots=True)
class StepResults:
    """Everything one step produced, by vLLM's request id; rides on the runner's output."""

    records: dict[str, list[StepRecord]]
    infos: dict[str, StepInfo]
    failures: dict[str, Failure]
    run_step: RunStep | None = None
    """Instead of records and infos, in a step of a run."""
    ended: list[str] = dataclasses.field(default_factory=list)
    """Traced requests whose blocks failed or stopped them."""
    news: dict[str, tuple[str, int, bytes | None, str]] = dataclasses.field(default_factory=dict)
    """What the blocks of traced requests that are watched tell: trace, block, what is newly saved, prints."""
    undone: list[str] = dataclasses.field(default_factory=list)
    """Requests whose rows of the step count for nothing: it went on without their blocks."""
    waiting: frozenset[str] | None = None
    """Requests that cannot go on before their blocks have answered; None for the same as before."""
    resting: frozenset[str] | None = None
    """Tenants whose sandboxed requests are not to be in a step now; None for the same as before."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Payload)
