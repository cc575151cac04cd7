"""Reassembles the payloads of one choice in the API process, where they arrive in order.

``take_part`` returns the results of the tokens delivered so far, so that a stream sends each token's results
with that token even when the engine is ahead of the reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.collect.assembly import assemble, gated_positions
from nnsight_engine.plans.collect.results import CollectedResults, CollectedSites
from nnsight_engine.plans.records import Failure, Payload, StepInfo, StepRecord
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, RequestPlan
from nnsight_engine.plans.sites import SAMPLES
from nnsight_engine.plans.where import Positions, evaluate

NUM_LENS_PARTS = 4
"""Number of parts of a lens record, see ``StepRecord``. Other records have at most one per site plus one."""


class RequestCollector:
    def __init__(
        self,
        plan: RequestPlan,
        spec: ModelSpec,
        *,
        prompt_token_ids: Sequence[int],
        op_names: Sequence[str],
    ) -> None:
        self._op_names = tuple(op_names)
        self._plan = plan
        self._spec = spec
        self._prompt_token_ids = list(prompt_token_ids)
        self._waiting: list[StepRecord] = []
        self._reduced: dict[int, StepRecord] = {}
        self._seen: set[int] = set()
        self.is_stopped = False
        self._gates: dict[int, list[StepRecord]] = defaultdict(list)
        self._info: StepInfo | None = None
        self.failure: Failure | None = None

    def add(self, payload: Payload) -> None:
        for record in payload.records:
            self._seen.add(record.op)
            op = self._plan.ops[record.op]
            self.is_stopped |= op.kind is OperationKind.STOP and any(record.parts[0])
            if not op.reads:
                self._gates[record.op].append(record)
            elif op.reduce == "none":
                self._waiting.append(record)
            else:
                self._reduced[record.op] = record
        self._info = payload.info or self._info
        self.failure = payload.failure or self.failure

    @property
    def spent_s(self) -> float:
        return 0.0 if self._info is None else self._info.spent_s

    def take_part(self, num_delivered_tokens: int) -> CollectedResults | None:
        """Return results of the first ``num_delivered_tokens`` tokens that were not returned yet, or None."""
        # The token at index k was sampled at position prompt_len - 1 + k.
        last_position = self._plan.prompt_len + num_delivered_tokens - 2
        ready: list[StepRecord] = []
        waiting: list[StepRecord] = []
        for record in self._waiting:
            # Images are encoded before the first token.
            is_due = self._plan.ops[record.op].is_in_encoder or record.positions[-1] <= last_position
            (ready if is_due else waiting).append(record)
        if not ready:
            return None
        self._waiting = waiting
        return CollectedResults(results=assemble(self._plan, self._spec, ready), final=False)

    def take_final(self, generated_token_ids: Sequence[int]) -> CollectedResults:
        """Return all results not returned yet, the positions of each operation, and the provenance.

        Raises ``intervention_failed`` for too few computed positions, ``not_finite`` beyond a dtype.
        """
        info = self._checked_info(len(generated_token_ids))
        applied = self._applied(info, generated_token_ids)
        records = [*self._waiting, *self._reduced.values(), *self._empty_records()]
        self._waiting, self._reduced = [], {}
        return CollectedResults(
            results=assemble(self._plan, self._spec, records),
            final=True,
            applied=applied,
            fingerprint=self._plan.fingerprint,
            cached_tokens=max(info.first_position, 0),
            recomputed_tokens=info.recomputed_tokens,
            tier=info.tier,
            drafted_rows=info.drafted_rows,
            refused_rows=info.refused_rows,
        )

    def _checked_info(self, num_generated: int) -> StepInfo:
        info = self._info
        # The last token is sampled and never fed back.
        num_fed = self._plan.prompt_len + max(num_generated - 1, 0)
        is_complete = info is not None and (self.is_stopped or info.end_position >= num_fed)
        if info is None or not is_complete:
            seen = 0 if info is None else info.end_position
            raise InterventionError(
                "intervention_failed",
                f"the worker met {seen} of {num_fed} positions with this request's operations, so the answer "
                "is not what was asked for; this is a defect of the server, please report it",
            )
        return info

    def _empty_records(self) -> list[StepRecord]:
        """Return an empty record for each read that matched no position, so that its name has a result."""
        return [
            StepRecord(index, [], [b""] * max(len(op.sites) + 1, NUM_LENS_PARTS))
            for index, op in enumerate(self._plan.ops)
            if op.reads and index not in self._seen
        ]

    def _applied(self, info: StepInfo, generated_token_ids: Sequence[int]) -> list[CollectedSites]:
        """Return the positions of each operation, cached ones included: their keys and values contain it."""
        token_ids = np.asarray([*self._prompt_token_ids, *generated_token_ids], np.int64)
        # A sampled token that was never fed back has no position of its own.
        end = min(info.end_position, len(token_ids))
        positions = np.arange(end, dtype=np.int64)
        return [
            CollectedSites(
                op=name,
                at=[str(site) for site in op.sites],
                positions=self._positions(index, op, positions, token_ids[:end]),
                decides=_decides(op),
            )
            for index, (name, op) in enumerate(zip(self._op_names, self._plan.ops, strict=True))
        ]

    def _positions(self, index: int, op: PlannedOp, positions: Positions, token_ids: Positions) -> list[int]:
        if op.when is None or op.reads:
            return _matching_positions(op, self._plan, positions, token_ids)
        end = len(positions)
        return [position for position in gated_positions(self._gates[index]) if position < end]


def _decides(op: PlannedOp) -> list[str] | None:
    return None if op.when is None else ["next" if test.is_next else "same" for test in op.when.tests]


def _matching_positions(
    op: PlannedOp, plan: RequestPlan, positions: Positions, token_ids: Positions
) -> list[int]:
    if op.is_in_encoder:
        return list(op.where.positions or ())
    parts = None if plan.answer is None else plan.answer.parts(token_ids, plan.prompt_len)
    named = evaluate(op.where, positions, token_ids, plan.prompt_len, parts)
    if op.sites[0] == SAMPLES:
        # Nothing is sampled before the prompt's last position.
        named &= positions >= plan.prompt_len - 1
    met: list[int] = positions[named].tolist()
    return met
