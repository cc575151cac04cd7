"""Attention patterns: attention probabilities, recomputed for the rows that are captured.

Fused attention kernels never materialize the probabilities. In a step that captures them, the layer's
queries and keys are read on their way into attention: keys are stored for as long as the request
captures, and the softmax of the captured rows is computed separately, in float32, with the layer's own
scale, soft cap and window. The step builder calls the planner once per request and step.

Invariant: until the request's last capture, each key store receives the keys of every row that the
request computes, captured or not, before that step's patterns are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import PATTERN_LEAF, ModelSpec
from nnsight_engine.core.tensor_bytes import DTYPES
from nnsight_engine.plans.active import ActiveOp
from nnsight_engine.plans.groups import KernelMember, RowArray
from nnsight_engine.plans.host_arena import to_device
from nnsight_engine.plans.key_store import AttentionKeyStore
from nnsight_engine.plans.ledger import ByteLedger
from nnsight_engine.plans.reads import ReadKernel, SiteValue
from nnsight_engine.plans.request_plan import PlannedSite
from nnsight_engine.plans.step_plan import KernelGroup, PatternRead, Span, StepPlan
from nnsight_engine.plans.where import last_position
from nnsight_engine.plans.writes import Kernel

SCRATCH_BYTES: Final = 8 * 1024 * 1024
"""Limit on the size of each temporary tensor (widened keys or scores) while patterns are computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionForm:
    """Parameters with which one layer turns queries and keys into probabilities.

    Attributes:
        scale: Factor on the dot products.
        soft_cap: Scores become ``cap * tanh(score / cap)``; 0 for none.
        window: A query sees this many last positions, its own included; 0 for all.
    """

    scale: float
    soft_cap: float = 0.0
    window: int = 0


FormOf = Callable[[int], AttentionForm]
"""Returns a layer's form of attention; raises InterventionError if patterns cannot be computed."""


@dataclasses.dataclass(slots=True)
class StoreKeys(ReadKernel):
    """Stores the keys of a request's rows ``first_row`` to ``stop_row``, from position ``start`` on."""

    store: AttentionKeyStore
    start: int
    first_row: int
    stop_row: int

    def read(self, value: SiteValue) -> None:
        """Copy the keys into the store."""
        keys = value.keys(self.first_row, self.stop_row)
        if keys is None:
            raise InterventionError("intervention_failed", "the layer shares another layer's keys")
        self.store.put(self.start, keys)


@dataclasses.dataclass(slots=True)
class ComputePattern(ReadKernel):
    """Computes the patterns of ``rows``, at ascending ``positions``, into ``out``.

    ``out`` is ``[rows, heads, keys]`` and initially zero. ``position_numbers`` are the positions
    as Python integers, so that the device need not be synchronized.
    """

    store: AttentionKeyStore
    form: AttentionForm
    rows: torch.Tensor
    positions: torch.Tensor
    position_numbers: list[int]
    out: torch.Tensor
    scratch_bytes: int = SCRATCH_BYTES

    def read(self, value: SiteValue) -> None:
        """Compute the patterns from the step's queries."""
        num_heads, head_dim = value.shape[1:]
        keys = self.store.first(self.position_numbers[-1] + 1)
        num_keys, num_kv_heads = keys.shape[:2]
        group = num_heads // num_kv_heads
        step = max(1, self.scratch_bytes // (num_keys * head_dim * torch.float32.itemsize))
        for first in range(0, num_kv_heads, step):
            own = keys[:, first : first + step].to(torch.float32)
            heads = slice(first * group, (first + own.shape[1]) * group)
            self._fill(value, heads, own)

    def _fill(self, value: SiteValue, heads: slice, keys: torch.Tensor) -> None:
        num_keys, num_kv_heads, head_dim = keys.shape
        out = self.out[:, heads]
        step = max(1, self.scratch_bytes // (num_keys * out.shape[1] * torch.float32.itemsize))
        for start in range(0, len(self.rows), step):
            stop = min(start + step, len(self.rows))
            seen = self.position_numbers[stop - 1] + 1
            own = value.queries(self.rows[start:stop])[:, heads]
            # Neighbouring heads share a key head: [rows, key heads, queries of each, head_dim].
            own = own.view(stop - start, num_kv_heads, -1, head_dim)
            scores = torch.einsum("rhgd,khd->rhgk", own, keys[:seen]).flatten(1, 2)
            out[start:stop, :, :seen] = self._probabilities(scores, self.positions[start:stop])

    def _probabilities(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scores = scores.mul_(self.form.scale)
        if self.form.soft_cap:
            scores = scores.div_(self.form.soft_cap).tanh_().mul_(self.form.soft_cap)
        distance = positions[:, None] - torch.arange(scores.shape[-1], device=scores.device)
        unseen = distance < 0
        if self.form.window:
            unseen |= distance >= self.form.window
        return scores.masked_fill_(unseen[:, None], float("-inf")).softmax(dim=-1)


class PatternPlanner:
    """Plans the pattern captures of one request in a step.

    Args:
        spec: The model's description.
        dtype: The model's dtype, also that of the keys.
        device: The model's device.
        ledger: Counts keys and patterns before they are allocated.
        form_of: Returns a layer's form of attention.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ledger: ByteLedger,
        form_of: FormOf,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._ledger = ledger
        self._form_of = form_of

    def plan(self, plan: StepPlan, span: Span, captures: Sequence[tuple[ActiveOp, RowArray]]) -> bool:
        """Add a request's pattern captures to a step, or mark the request failed.

        Args:
            plan: The step.
            span: The request's rows in it.
            captures: All its operations that capture patterns, and the offsets in the span at
                which each captures in this step.

        Returns:
            Whether the request goes on.
        """
        open_until = self._open_until(span, captures)
        self._free(span, open_until)
        try:
            for layer, stop in open_until.items():
                self._plan_keys(plan, span, layer, stop)
            for active, offsets in captures:
                if len(offsets):
                    self._plan_rows(plan, span, active, offsets)
        except InterventionError as error:
            span.request.fail(error.code, error.message)
            return False
        return True

    def _open_until(self, span: Span, captures: Sequence[tuple[ActiveOp, RowArray]]) -> dict[int, int]:
        """Return, for each layer that still captures, one past the last position that may be captured."""
        found: dict[int, int] = {}
        for active, _ in captures:
            last = last_position(active.op.where, span.request.plan.prompt_len)
            if last is not None and span.request.end_position > last:
                continue
            stop = self._spec.max_model_len if last is None else last + 1
            for site in active.op.sites:
                found[site.layer] = max(found.get(site.layer, 0), stop)
        return found

    def _free(self, span: Span, open_until: dict[int, int]) -> None:
        stores = span.request.patterns.stores
        for layer in [layer for layer in stores if layer not in open_until]:
            self._ledger.give_back(span.request.request_id, self._key_bytes(stores.pop(layer).capacity))

    def _plan_keys(self, plan: StepPlan, span: Span, layer: int, open_until: int) -> None:
        stop = min(span.stop, open_until)
        if stop <= span.start:
            return
        store = self._store(span, layer, stop, open_until)
        kernel = StoreKeys(store, span.start, span.row, span.row + stop - span.start)
        owner = next(op for op in span.request.ops if PlannedSite(PATTERN_LEAF, layer) in op.op.sites)
        index = owner.op.sites.index(PlannedSite(PATTERN_LEAF, layer))
        self._add_group(plan, kernel, KernelMember(span.request, owner, index, np.empty(0, np.int64)))

    def _store(self, span: Span, layer: int, stop: int, open_until: int) -> AttentionKeyStore:
        """Return the request's key store of a layer, with memory up to position ``stop``."""
        request = span.request
        store = request.patterns.stores.get(layer)
        if store is not None and store.capacity >= stop:
            return store
        # A prompt's length is known in advance; for generated positions the capacity doubles.
        wanted = request.plan.prompt_len if store is None else 2 * store.capacity
        capacity = max(stop, min(wanted, open_until))
        self._ledger.reserve(request.request_id, self._key_bytes(capacity))
        keys = torch.empty(capacity, *self._key_shape(), dtype=self._dtype, device=self._device)
        if store is None:
            store = request.patterns.stores[layer] = AttentionKeyStore(keys)
        else:
            old_bytes = self._key_bytes(store.capacity)
            store.move_to(keys)
            self._ledger.give_back(request.request_id, old_bytes)
        return store

    def _plan_rows(self, plan: StepPlan, span: Span, active: ActiveOp, offsets: RowArray) -> None:
        positions = (offsets + span.start).tolist()
        num_heads = active.widths[0]
        dtype = DTYPES[active.op.dtype] if active.op.dtype else self._dtype
        row_bytes = len(active.op.sites) * num_heads * dtype.itemsize
        self._reserve_rows(span, active, len(offsets), positions[-1] + 1, row_bytes)
        forms = [self._form_of(site.layer) for site in active.op.sites]
        out = torch.zeros(
            len(active.op.sites), len(offsets), num_heads, positions[-1] + 1, dtype=dtype, device=self._device
        )
        rows = to_device(offsets + span.row, self._device)
        at = to_device(offsets + span.start, self._device)
        for index, (site, form) in enumerate(zip(active.op.sites, forms, strict=True)):
            store = span.request.patterns.stores[site.layer]
            kernel = ComputePattern(store, form, rows, at, positions, out[index])
            self._add_group(plan, kernel, KernelMember(span.request, active, index, offsets + span.row))
        plan.patterns.append(PatternRead(span.request, active, positions, out))

    def _reserve_rows(
        self, span: Span, active: ActiveOp, num_rows: int, num_keys: int, row_bytes: int
    ) -> None:
        """Reserve the growth of the result tensor, in which every row is as long as the last."""
        shapes = span.request.patterns.shapes
        held_rows, held_keys = shapes.get(active.index, (0, 0))
        rows = held_rows + num_rows if active.op.reduce == "none" else 1
        growth = rows * num_keys - held_rows * held_keys
        self._ledger.reserve(span.request.request_id, growth * row_bytes)
        shapes[active.index] = (rows, num_keys)

    def _add_group(self, plan: StepPlan, kernel: Kernel, member: KernelMember) -> None:
        site = member.active.op.sites[member.site_index]
        plan.groups.setdefault(site, []).append(KernelGroup(kernel, [member], lambda _member: kernel))

    def _key_shape(self) -> tuple[int, ...]:
        leaf = self._spec.leaf("attn.k")
        if leaf is None:
            raise InterventionError("unknown_point", "attention patterns need attn.k, which the model lacks")
        return leaf.shape

    def _key_bytes(self, num_positions: int) -> int:
        num_heads, head_dim = self._key_shape()
        return num_positions * num_heads * head_dim * self._dtype.itemsize
