"""The interventions of one step, batched over the requests of the step.

A plan is built before the forward pass, run by taps and hooks, and collected before sampling. It records the
sites that were reached, so that a site which was not (for example in a graph replayed without its taps) fails
its requests instead of returning an unsteered completion.

A row whose change float16 cannot hold keeps its value and is marked on the device; its request fails when the
results are delivered, so that no step waits. The other dtypes have the range of float32.

While the same requests decode in the same rows, and none of their operations depends on tokens or positions,
one plan serves step after step, a *streak*, and all is counted for all requests together: no Python work per
request. A streak ends at a different batch, a failed request, or a limit that a request reaches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.records import Failure
from nnsight_engine.plans.request_plan import LOGITS, PlannedSite
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest
from nnsight_engine.plans.step.context import ByteLedger, SiteKey, StepBytes, name_of
from nnsight_engine.plans.step.host_arena import HostCopy, to_device
from nnsight_engine.plans.step.table import Member

RowArray = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class LogitsRows:
    """Source of the logits rows that a plan wants, valid for the engine's ``sample_rows`` (ascending).

    Of the wanted rows, ``known`` are among the engine's logits, at ``sampled``; ``other``, None if there are
    none, have to be computed from the step's rows ``hidden``.
    """

    sample_rows: RowArray
    known: torch.Tensor
    sampled: torch.Tensor
    other: torch.Tensor | None
    hidden: torch.Tensor

    @classmethod
    def of(cls, rows: RowArray, sample_rows: RowArray, device: torch.device) -> Self:
        """Return the source of the wanted ``rows``, of which the engine computes ``sample_rows`` anyway."""
        index = np.minimum(np.searchsorted(sample_rows, rows), len(sample_rows) - 1)
        is_known = sample_rows[index] == rows

        def on_device(values: RowArray) -> torch.Tensor:
            return to_device(values, device)

        return cls(
            sample_rows=sample_rows.copy(),
            known=on_device(np.flatnonzero(is_known)),
            sampled=on_device(index[is_known]),
            other=None if is_known.all() else on_device(np.flatnonzero(~is_known)),
            hidden=on_device(rows[~is_known]),
        )

    def holds(self, sample_rows: RowArray) -> bool:
        return np.array_equal(self.sample_rows, sample_rows)

    def gather(
        self,
        sampled: torch.Tensor,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the wanted rows, computing those not in ``sampled``, ``[requests + drafts, vocabulary]``."""
        if self.other is None:
            return sampled.index_select(0, self.sampled)
        logits = sampled.new_empty(len(self.known) + len(self.other), sampled.shape[1])
        logits[self.known] = sampled[self.sampled]
        logits[self.other] = compute_logits(hidden[self.hidden]).to(logits.dtype)
        return logits

    def put_back(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        sampled[self.sampled] = logits[self.known]


_FAILURE: Final = Failure(
    "not_finite",
    "what the operation adds is beyond float16, in which the model computes; use a smaller scale, "
    "or serve the model in bfloat16 or float32",
)


class FlaggedRows(NamedTuple):
    """Flags of neighbouring rows of one request; the first belongs to row ``offset`` of its span."""

    request_id: str
    start: int
    stop: int
    offset: int = 0


@dataclasses.dataclass(slots=True)
class Overflows:
    """Rows at which a change was beyond float16; ``flags`` are ``[rows of the step + rows with logits]``."""

    flags: torch.Tensor
    flagged_rows: list[FlaggedRows]
    num_rows: int

    @classmethod
    def of(
        cls, spans: Iterable[FlaggedRows], logits_rows: npt.NDArray[np.int64], device: torch.device
    ) -> Overflows:
        """Return flags for the rows of requests (``spans``), and for those of them that have logits."""
        of_rows = list(spans)
        num_rows = max(flagged.stop for flagged in of_rows)
        of_logits = [
            FlaggedRows(flagged.request_id, num_rows + place, num_rows + place + 1, row - flagged.start)
            for flagged in of_rows
            for place, row in enumerate(logits_rows.tolist())
            if flagged.start <= row < flagged.stop
        ]
        flags = torch.zeros(num_rows + len(logits_rows), dtype=torch.bool, device=device)
        return cls(flags, of_rows + of_logits, num_rows)

    def flags_at(self, key: SiteKey) -> torch.Tensor:
        return self.flags[self.num_rows :] if key == LOGITS else self.flags[: self.num_rows]


def overflow_failures(
    flagged_rows: Sequence[FlaggedRows], flags: npt.NDArray[np.bool_], num_kept: Mapping[str, int]
) -> dict[str, Failure]:
    """Return the failures of requests that have a flag set on a row that counts.

    ``num_kept`` is the number of rows that count of a request with drafts: not those of refused ones.
    """
    if not flags.any():
        return {}
    failures = {}
    for request_id, start, stop, offset in flagged_rows:
        kept_stop = min(stop, start + num_kept.get(request_id, stop) - offset)
        if flags[start : max(start, kept_stop)].any():
            failures[request_id] = _FAILURE
    return failures


logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Span:
    """A request's rows in one step.

    Attributes:
        token_ids: Ids of the request's tokens by absolute position, as far as the host knows them.
        step_token_ids: Ids of the tokens of all rows of the step, on the device; None only if the host knows
            all ids of the span.
        num_drafts: Number of its last rows whose tokens are drafts.
        index: Position of the request among the step's requests.
    """

    request: ActiveRequest
    row: int
    num_rows: int
    start: int
    token_ids: npt.NDArray[np.int32]
    step_token_ids: torch.Tensor | None = None
    num_drafts: int = 0
    index: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.num_rows

    @property
    def num_certain(self) -> int:
        return self.num_rows - self.num_drafts


class Kernel(Protocol):
    """Work at one site that is no instruction; it computes everything before it changes anything."""

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Read or change the kernel's rows; both tensors are ``[tokens, width]``."""


class SiteWork(Protocol):
    members: list[Member]

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None: ...


@dataclasses.dataclass(slots=True)
class KernelGroup:
    """A kernel and its operations; ``alone`` returns the kernel of one of them, given its number."""

    kernel: Kernel
    members: list[Member]
    alone: Callable[[int], Kernel] | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Run the kernel; if it raises, having changed nothing, run each operation alone, and fail those."""
        try:
            self.kernel.run(hidden, residual)
        except Exception as error:  # noqa: BLE001 - whatever was raised, it concerns these requests alone
            if self.alone is None or len(self.members) == 1:
                for member in self.members:
                    member.fail(error)
                return
            for number, member in enumerate(self.members):
                try:
                    self.alone(number).run(hidden, residual)
                except Exception as own_error:  # noqa: BLE001 - as above
                    member.fail(own_error)


@dataclasses.dataclass(slots=True)
class ReadSlice:
    """One request's rows in a read group's buffers, from ``start`` to ``stop``.

    ``offsets`` are those of the rows in the request's span; ``first`` is that span's first row, if they are
    of an image in the vision encoder. The first ``num_delivered`` rows were delivered by an earlier step.
    """

    request: ActiveRequest
    active: ActiveOp
    start: int
    stop: int
    offsets: npt.NDArray[np.int64]
    first: int | None = None
    num_delivered: int = 0


class MovingWords(NamedTuple):
    """Words that depend on positions: by ``moves`` from step to step of a streak, ``[words]`` both."""

    words: torch.Tensor
    moves: torch.Tensor


@dataclasses.dataclass(slots=True)
class ReadGroup:
    """Reads of the same form over many requests: one buffer ``[rows, sites, width]`` per width.

    Probes have one ``[rows, sites]``; captures that may overflow have one more, see ``may_overflow``.
    ``mask`` is an index among the plan's masks; None if the operations act on all rows.
    """

    buffers: list[torch.Tensor]
    slices: list[ReadSlice]
    mask: int | None = None
    num_parts: int = 0


class GroupedReads(Protocol):
    """Reads of which several groups are computed together, behind the forward pass."""

    groups: list[ReadGroup]

    def read(self) -> dict[int, list[torch.Tensor]]:
        """Return the parts of the records of each group, by the ``id`` of the group."""

    def alone(self) -> list[GroupedReads]: ...


@dataclasses.dataclass(slots=True)
class PatternRead:
    """One capture's attention patterns, ``[sites, rows, heads, last position + 1]``."""

    request: ActiveRequest
    active: ActiveOp
    positions: list[int]
    out: torch.Tensor
    mask: int | None = None


class PlannedSample(NamedTuple):
    """A capture of ids that are sampled for a request.

    ``steps`` are their indices among those that the step yields for the request: several if drafts are
    accepted; one with a mask, since such a capture takes no drafts (``plans.where``).
    """

    request: ActiveRequest
    active: ActiveOp
    mask: int | None = None
    steps: tuple[int, ...] = (0,)


@dataclasses.dataclass(slots=True)
class StepPlan:
    """The batched interventions of one step, complete before the step runs.

    Attributes:
        groups: Work by site, in the order in which it runs.
        held: Tensors that instructions point into.
        masks: Which rows are named by operations whose rules the device decides, see ``token_masks``.
        overflows_before: The overflows of earlier pipeline stages, in this step.
        logits_rows: Batch rows whose logits the ``logits`` site needs, ascending.
        reserved: Bytes that each request needs in every step that runs this plan.
        signature: Key that the next step must match to reuse this plan; None forbids reuse.
        copy: The values that the step has read, on their way to the host; None before ``collect``.
        ran: Sites reached so far.
        is_unreported: Whether the requests' infos have unreported changes beside positions and times.
    """

    spans: dict[str, Span]
    groups: dict[SiteKey, list[SiteWork]] = dataclasses.field(default_factory=dict)
    reads: list[ReadGroup] = dataclasses.field(default_factory=list)
    computed: list[GroupedReads] = dataclasses.field(default_factory=list)
    patterns: list[PatternRead] = dataclasses.field(default_factory=list)
    samples: list[PlannedSample] = dataclasses.field(default_factory=list)
    masks: list[torch.Tensor] = dataclasses.field(default_factory=list)
    overflows: list[Overflows] = dataclasses.field(default_factory=list)
    overflows_before: list[Overflows] = dataclasses.field(default_factory=list)
    moving: list[MovingWords] = dataclasses.field(default_factory=list)
    held: list[torch.Tensor] = dataclasses.field(default_factory=list)
    means: list[tuple[ActiveRequest, tuple[int, int], torch.Tensor]] = dataclasses.field(default_factory=list)
    logits_rows: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    logits_from: LogitsRows | None = None
    writes_logits: bool = False
    reserved: dict[str, StepBytes] = dataclasses.field(default_factory=dict)
    signature: tuple[object, ...] | None = None
    copy: HostCopy | None = None
    ran: set[SiteKey] = dataclasses.field(default_factory=set)
    spent_s: float = 0.0
    tier: str = ""
    is_unreported: bool = False
    _hook_sites: tuple[PlannedSite, ...] | None = None
    _taps: frozenset[int] | None = None

    def run(self, key: SiteKey, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Do the work at a site; called with the site's value when the forward pass reaches it."""
        groups = self.groups.get(key)
        if groups is None:
            return
        self.ran.add(key)
        begin = time.monotonic()
        for group in groups:
            group.run(hidden, residual)
        self.spent_s += time.monotonic() - begin

    def keep_means(self) -> None:
        """Give the means that the step has taken to their requests, for their later steps."""
        for request, place, mean in self.means:
            request.means[place] = mean
        self.means.clear()

    def take_over(self, earlier: StepPlan) -> None:
        """Deliver what an earlier plan has read, in the vision encoder, with this step's results."""
        self.reads += earlier.reads
        self.overflows += earlier.overflows
        self.spent_s += earlier.spent_s
        for request_id, reserved in earlier.reserved.items():
            self.reserved.setdefault(request_id, StepBytes()).scratch += reserved.scratch

    def add_mask(self, mask: torch.Tensor) -> int:
        self.masks.append(mask)
        return len(self.masks) - 1

    def hook_sites(self) -> Sequence[PlannedSite]:
        """Return the sites that only an uncompiled step with hooks reaches."""
        if self._hook_sites is None:
            sites = (key for key in self.groups if isinstance(key, PlannedSite) and key.layer >= 0)
            self._hook_sites = tuple(sites)
        return self._hook_sites

    def taps(self) -> frozenset[int]:
        if self._taps is None:
            self._taps = frozenset(key for key in self.groups if isinstance(key, int))
        return self._taps

    def writes_at(self, key: SiteKey) -> bool:
        groups = self.groups.get(key, [])
        return any(member.writes for group in groups for member in group.members)

    @contextlib.contextmanager
    def containing(self, key: SiteKey) -> Iterator[None]:
        """Contain exceptions raised in the block: they fail only the requests of that site."""
        try:
            yield
        except Exception as error:
            logger.exception("a point could not be served")
            self.ran.add(key)
            for group in self.groups.get(key, ()):
                for member in group.members:
                    member.fail(error)

    def fail_unreached(self) -> None:
        """Fail the requests with work at a site that the forward pass has not reached."""
        for key, groups in self.groups.items():
            if key in self.ran:
                continue
            for group in groups:
                for member in group.members:
                    member.request.fail(
                        "intervention_failed",
                        f"the forward pass never reached {name_of(key)}, so nothing was applied there; this "
                        "is a defect of the server, please report it with the model's name",
                    )

    def note_tier(self, tier: str) -> None:
        """Record how the step has run, and whether that changes what its requests report."""
        if tier == self.tier:
            return
        self.tier = tier
        for span in self.spans.values():
            before = span.request.tier
            span.request.note_tier(tier, is_prompt=span.start < span.request.plan.prompt_len)
            self.is_unreported |= span.request.tier != before

    def take_time(self) -> float:
        seconds, self.spent_s = self.spent_s, 0.0
        return seconds

    def share_time(self) -> None:
        """Distribute the step's time over its requests, weighted by rows times points."""
        works = [span.num_rows * span.request.plan.num_points for span in self.spans.values()]
        per_work = self.take_time() / max(1, sum(works))
        for span, work in zip(self.spans.values(), works, strict=True):
            span.request.spent_s += work * per_work

    def reset(self) -> None:
        """Prepare the plan for its next step: words move on by a position, and results are dropped."""
        self.ran.clear()
        for moved in self.moving:
            moved.words.add_(moved.moves)
        if self.copy is not None:
            self.copy.precede_writes()
            self.copy = None
        self.overflows_before.clear()
        for overflow in self.overflows:
            overflow.flags.zero_()


class Streak:
    """The steps that reuse one plan after the step it was built for; counts are since the last settlement.

    ``point_s`` are seconds per point at which a request's operations act.
    """

    def __init__(
        self,
        plan: StepPlan,
        request_ids: Sequence[str],
        positions: npt.NDArray[np.integer],
        ledger: ByteLedger,
    ) -> None:
        self.plan = plan
        self.num_steps = 0
        self.point_s = self.delivery_point_s = 0.0
        self._request_ids = list(request_ids)
        self._positions = positions.astype(np.int64)
        self._ledger = ledger
        self._num_points = self._kept_bytes = self._scratch_bytes = self._max_steps = 0

    def advance(self, request_ids: Sequence[str], positions: npt.NDArray[np.integer]) -> bool:
        """Prepare the plan for the next step (one row per request), or return False if the streak ends."""
        self._positions += 1
        # Scheduler and worker agree on the requests by this comparison alone; no request is inspected.
        if request_ids != self._request_ids or not np.array_equal(positions, self._positions):
            return False
        if not self.num_steps:
            self._record_first_step()
        if self.num_steps >= self._max_steps or not self._ledger.reserve_all(
            self._kept_bytes + self._scratch_bytes
        ):
            return False
        self.num_steps += 1
        self.plan.reset()
        return True

    def _record_first_step(self) -> None:
        """Compute what each step costs, and how many steps the requests' limits allow."""
        plan = self.plan
        self._num_points = sum(span.request.plan.num_points for span in plan.spans.values())
        self._kept_bytes = sum(reserved.kept for reserved in plan.reserved.values())
        self._scratch_bytes = sum(reserved.scratch for reserved in plan.reserved.values())
        self._max_steps = min(
            self._ledger.num_steps(request_id, reserved.kept, reserved.scratch)
            for request_id, reserved in plan.reserved.items()
        )

    def count_time(self) -> None:
        self.point_s += self.plan.take_time() / self._num_points

    def note_delivery(self, seconds: float) -> None:
        """Add the time that the delivery of a step's results took; may be called from another thread."""
        self.delivery_point_s += seconds / self._num_points

    def give_back(self) -> None:
        self._ledger.give_back_all(self._scratch_bytes)

    def settle(self, *, is_under_way: bool = False) -> None:
        """Attribute the streak's counts to its requests, without the position of a step that is under way."""
        num_steps, num_done = self.num_steps, self.num_steps - is_under_way
        for request_id, span in self.plan.spans.items() if num_steps else ():
            request = span.request
            request.end_position += num_done
            request.charged_position += num_steps
            request.spent_s += (self.point_s + self.delivery_point_s) * request.plan.num_points
            span.start += num_steps
            self._ledger.assign(request_id, num_steps * self.plan.reserved[request_id].kept)
        self.num_steps, self.point_s, self.delivery_point_s = 0, 0.0, 0.0
