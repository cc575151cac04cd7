"""Plans the attention patterns that a request captures in a step.

Invariant: until the request's last capture, each key store receives the keys of every row that the
request computes, captured or not, before that step's patterns are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.leaves import PATTERN
from nnsight_engine.plans.sites import PlannedSite
from nnsight_engine.plans.step.active import ActiveOp
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.patterns import AttentionKeyStore, ComputePattern, StoreKeys
from nnsight_engine.plans.step.plan import Kernel, KernelGroup, PatternRead, Span, StepPlan
from nnsight_engine.plans.step.table import Member, RowArray
from nnsight_engine.plans.where import last_position


class PatternRows(NamedTuple):
    active: ActiveOp
    offsets: RowArray
    mask: torch.Tensor | None


class PatternPlanner:
    def __init__(self, context: StepContext) -> None:
        self._context = context

    def plan(self, plan: StepPlan, span: Span, captures: Sequence[PatternRows]) -> bool:
        """Add a request's pattern captures to a step, or mark the request failed and return False."""
        open_until = self._open_until(span, captures)
        self._free(span, open_until)
        try:
            for layer, stop in open_until.items():
                self._plan_keys(plan, span, layer, stop)
            for rows in captures:
                if len(rows.offsets):
                    self._plan_rows(plan, span, rows)
        except InterventionError as error:
            span.request.fail(error.code, error.message)
            return False
        return True

    def _open_until(self, span: Span, captures: Sequence[PatternRows]) -> dict[int, int]:
        """Return, for each layer that still captures, one past the last position that may be captured."""
        found: dict[int, int] = {}
        for active in (rows.active for rows in captures):
            last = last_position(active.op.where, span.request.plan.prompt_len)
            if last is not None and span.request.end_position > last:
                continue
            stop = self._context.spec.max_model_len if last is None else last + 1
            for site in filter(self._context.stage.has, active.op.sites):
                found[site.layer] = max(found.get(site.layer, 0), stop)
        return found

    def _free(self, span: Span, open_until: dict[int, int]) -> None:
        stores = span.request.patterns.stores
        for layer in [layer for layer in stores if layer not in open_until]:
            num_bytes = self._key_bytes(layer, stores.pop(layer).capacity)
            self._context.ledger.give_back(span.request.request_id, num_bytes)

    def _plan_keys(self, plan: StepPlan, span: Span, layer: int, open_until: int) -> None:
        stop = min(span.stop, open_until)
        if stop <= span.start:
            return
        store = self._store(span, layer, stop, open_until)
        kernel = StoreKeys(store, span.start, span.row, span.row + stop - span.start)
        owner = next(op for op in span.request.ops if PlannedSite(PATTERN, layer) in op.op.sites)
        self._add_group(plan, kernel, Member(span.request, owner), PlannedSite(PATTERN, layer))

    def _store(self, span: Span, layer: int, stop: int, open_until: int) -> AttentionKeyStore:
        request = span.request
        store = request.patterns.stores.get(layer)
        if store is not None and store.capacity >= stop:
            return store
        # A prompt's length is known in advance; for generated positions the capacity doubles.
        wanted = request.plan.prompt_len if store is None else 2 * store.capacity
        capacity = max(stop, min(wanted, open_until))
        context = self._context
        context.ledger.reserve(request.request_id, self._key_bytes(layer, capacity))
        keys = torch.empty(capacity, *self._key_shape(layer), dtype=context.dtype, device=context.device)
        if store is None:
            store = request.patterns.stores[layer] = AttentionKeyStore(keys)
        else:
            old_bytes = self._key_bytes(layer, store.capacity)
            store.move_to(keys)
            context.ledger.give_back(request.request_id, old_bytes)
        return store

    def _plan_rows(self, plan: StepPlan, span: Span, captured: PatternRows) -> None:
        active, offsets, mask = captured
        positions = (offsets + span.start).tolist()
        num_heads, device = active.widths[0], self._context.device
        dtype = self._context.capture_dtype(active.op)
        row_bytes = len(active.op.sites) * num_heads * dtype.itemsize
        self._reserve_rows(span, active, len(offsets), positions[-1] + 1, row_bytes)
        held = [
            (index, site, self._context.form_of(site.layer))
            for index, site in enumerate(active.op.sites)
            if self._context.stage.has(site)
        ]
        out = torch.zeros(
            len(active.op.sites),
            len(offsets),
            num_heads,
            positions[-1] + 1,
            dtype=dtype,
            device=device,
        )
        rows = to_device(offsets + span.row, device)
        at = to_device(offsets + span.start, device)
        for index, site, form in held:
            store = span.request.patterns.stores[site.layer]
            kernel = ComputePattern(store, form, rows, at, positions, out[index])
            self._add_group(plan, kernel, Member(span.request, active), site)
        index_of_mask = None if mask is None else plan.add_mask(mask)
        plan.patterns.append(PatternRead(span.request, active, positions, out, index_of_mask))

    def _reserve_rows(
        self, span: Span, active: ActiveOp, num_rows: int, num_keys: int, row_bytes: int
    ) -> None:
        """Reserve the growth of the result tensor, in which every row is as long as the last."""
        shapes = span.request.patterns.shapes
        held_rows, held_keys = shapes.get(active.index, (0, 0))
        rows = held_rows + num_rows if active.op.reduce == "none" else 1
        growth = rows * num_keys - held_rows * held_keys
        self._context.ledger.reserve(span.request.request_id, growth * row_bytes)
        shapes[active.index] = (rows, num_keys)

    @staticmethod
    def _add_group(plan: StepPlan, kernel: Kernel, member: Member, site: PlannedSite) -> None:
        plan.groups.setdefault(site, []).append(KernelGroup(kernel, [member]))

    def _key_shape(self, layer: int) -> tuple[int, ...]:
        leaf = self._context.spec.leaf("attn.k", layer)
        if leaf is None:
            raise InterventionError("unknown_point", "attention patterns need attn.k, which the model lacks")
        return leaf.shape

    def _key_bytes(self, layer: int, num_positions: int) -> int:
        num_heads, head_dim = self._key_shape(layer)
        return num_positions * num_heads * head_dim * self._context.dtype.itemsize
