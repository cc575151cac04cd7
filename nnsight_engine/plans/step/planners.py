"""Plans a step's operations: writes as instructions and kernels, reads into shared buffers, and patterns.

Invariant: until a request's last capture of attention patterns, each key store receives the keys of every row
that the request computes, captured or not, before that step's patterns are computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import PATTERN
from nnsight_engine.plans.records import leaf_width, may_overflow, width_classes
from nnsight_engine.plans.request_plan import OperationKind, PlannedSite
from nnsight_engine.plans.step.active import ActiveOp
from nnsight_engine.plans.step.condition_planner import score_key
from nnsight_engine.plans.step.context import SiteKey, StepContext
from nnsight_engine.plans.step.feature_kernels import ChangedRows, bounded, changes_of
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.instructions import Code, Instructions, Word, Words
from nnsight_engine.plans.step.operation_rows import OperationRows, PlanInProgress, mean_rows, with_rows_alike
from nnsight_engine.plans.step.plan import (
    FlaggedRows,
    Kernel,
    KernelGroup,
    Overflows,
    PatternRead,
    ReadGroup,
    ReadSlice,
    Span,
    StepPlan,
)
from nnsight_engine.plans.step.read_kernels import AttentionKeyStore, ComputePattern, GatherStates, StoreKeys
from nnsight_engine.plans.step.table import (
    NARROWED_KINDS,
    WITH_FACTORS,
    Block,
    Member,
    RowArray,
    addresses,
    in_order,
    patch_bytes,
    reads,
)
from nnsight_engine.plans.where import last_position


class PatternRows(NamedTuple):
    active: ActiveOp
    offsets: RowArray
    mask: torch.Tensor | None


def plan_patterns(context: StepContext, plan: StepPlan, span: Span, captures: Sequence[PatternRows]) -> bool:
    """Add a request's pattern captures to a step, or mark the request failed and return False."""
    open_until = _capture_ends(context, span, captures)
    _free_key_stores(context, span, open_until)
    try:
        for layer, stop in open_until.items():
            _plan_key_store(context, plan, span, layer, stop)
        for rows in captures:
            if len(rows.offsets):
                _plan_pattern_rows(context, plan, span, rows)
    except InterventionError as error:
        span.request.fail(error.code, error.message)
        return False
    return True


def _capture_ends(context: StepContext, span: Span, captures: Sequence[PatternRows]) -> dict[int, int]:
    """Return, for each layer that still captures, one past the last position that may be captured."""
    open_until: dict[int, int] = {}
    for active in (rows.active for rows in captures):
        last = last_position(active.op.where, span.request.plan.prompt_len)
        if last is not None and span.request.end_position > last:
            continue
        stop = context.spec.max_model_len if last is None else last + 1
        for site in filter(context.stage.has, active.op.sites):
            open_until[site.layer] = max(open_until.get(site.layer, 0), stop)
    return open_until


def _free_key_stores(context: StepContext, span: Span, open_until: dict[int, int]) -> None:
    """Free the stores of the layers at which nothing more is captured."""
    stores = span.request.patterns.stores
    for layer in [layer for layer in stores if layer not in open_until]:
        num_bytes = _key_bytes(context, layer, stores.pop(layer).capacity)
        context.ledger.give_back(span.request.request_id, num_bytes)


def _plan_key_store(context: StepContext, plan: StepPlan, span: Span, layer: int, open_until: int) -> None:
    """Plan to store a layer's keys of the step's rows, up to the last position that may be captured."""
    stop = min(span.stop, open_until)
    if stop <= span.start:
        return
    store = _key_store(context, span, layer, stop, open_until)
    kernel = StoreKeys(store, span.start, span.row, span.row + stop - span.start)
    owner = next(op for op in span.request.ops if PlannedSite(PATTERN, layer) in op.op.sites)
    _add_kernel(plan, kernel, Member(span.request, owner), PlannedSite(PATTERN, layer))


def _key_store(context: StepContext, span: Span, layer: int, stop: int, open_until: int) -> AttentionKeyStore:
    """Return the store of a layer's keys, grown to at least ``stop`` and at most ``open_until`` positions."""
    request = span.request
    store = request.patterns.stores.get(layer)
    if store is not None and store.capacity >= stop:
        return store
    # A prompt's length is known in advance; for generated positions the capacity doubles.
    wanted = request.plan.prompt_len if store is None else 2 * store.capacity
    capacity = max(stop, min(wanted, open_until))
    context.ledger.reserve(request.request_id, _key_bytes(context, layer, capacity))
    keys = torch.empty(capacity, *_key_shape(context, layer), dtype=context.dtype, device=context.device)
    if store is None:
        store = request.patterns.stores[layer] = AttentionKeyStore(keys)
    else:
        old_bytes = _key_bytes(context, layer, store.capacity)
        store.move_to(keys)
        context.ledger.give_back(request.request_id, old_bytes)
    return store


def _plan_pattern_rows(context: StepContext, plan: StepPlan, span: Span, captured: PatternRows) -> None:
    """Plan one capture's patterns on this step's rows, of which each stage computes its own layers."""
    active, offsets, mask = captured
    positions = (offsets + span.start).tolist()
    num_heads, device = active.widths[0], context.device
    dtype = context.capture_dtype(active.op)
    row_bytes = len(active.op.sites) * num_heads * dtype.itemsize
    _reserve_pattern_rows(context, span, active, len(offsets), positions[-1] + 1, row_bytes)
    sites_in_stage = [
        (index, site, context.form_of(site.layer))
        for index, site in enumerate(active.op.sites)
        if context.stage.has(site)
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
    row_positions = to_device(offsets + span.start, device)
    for index, site, form in sites_in_stage:
        store = span.request.patterns.stores[site.layer]
        kernel = ComputePattern(store, form, rows, row_positions, positions, out[index])
        _add_kernel(plan, kernel, Member(span.request, active), site)
    index_of_mask = None if mask is None else plan.add_mask(mask)
    plan.patterns.append(PatternRead(span.request, active, positions, out, index_of_mask))


def _reserve_pattern_rows(
    context: StepContext, span: Span, active: ActiveOp, num_rows: int, num_keys: int, row_bytes: int
) -> None:
    """Reserve the growth of the result tensor, in which every row is as long as the last."""
    shapes = span.request.patterns.shapes
    held_rows, held_keys = shapes.get(active.index, (0, 0))
    rows = held_rows + num_rows if active.op.reduce == "none" else 1
    growth = rows * num_keys - held_rows * held_keys
    context.ledger.reserve(span.request.request_id, growth * row_bytes)
    shapes[active.index] = (rows, num_keys)


def _add_kernel(plan: StepPlan, kernel: Kernel, member: Member, site: PlannedSite) -> None:
    plan.groups.setdefault(site, []).append(KernelGroup(kernel, [member]))


def _key_shape(context: StepContext, layer: int) -> tuple[int, ...]:
    leaf = context.spec.leaf("attn.k", layer)
    if leaf is None:
        raise InterventionError("unknown_point", "attention patterns need attn.k, which the model lacks")
    return leaf.shape


def _key_bytes(context: StepContext, layer: int, num_positions: int) -> int:
    num_heads, head_dim = _key_shape(context, layer)
    return num_positions * num_heads * head_dim * context.dtype.itemsize


def read_key(item: OperationRows) -> Any:
    """Return what reads must have in common to share buffers; the fields depend on their kind."""
    op = item.active.op
    form = (op.kind, item.mask is not None, item.active.keys, item.stages)
    if op.kind is OperationKind.FEATURES:
        return (*form, op.features)
    if op.kind is OperationKind.LENS:
        return (*form, op.top_k, op.targets)
    if op.kind is OperationKind.PROBE:
        return form
    if item.active.score is not None:
        return (*form, *score_key(item.active.score))
    # A streak stores every step of an unreduced read and a single row of a reduced one.
    return (*form, op.dtype, op.reduce)


def plan_reads(work: PlanInProgress, items: list[OperationRows]) -> None:
    """Plan reads with the same key into shared buffers, one for each width of their sites."""
    op, stage = items[0].active.op, work.context.stage
    if not (stage.is_last or any(map(stage.has, items[0].active.keys))):
        return
    num_rows = sum(len(item.offsets) for item in items)
    group = ReadGroup([], [], work.mask_of(items))
    start = 0
    for item in items:
        stop = start + len(item.offsets)
        group.slices.append(ReadSlice(item.span.request, item.active, start, stop, item.offsets))
        start = stop
    overflows = None
    if may_overflow(op, work.context.spec):
        overflows = torch.empty(num_rows, len(op.sites), dtype=torch.bool, device=work.context.device)
    for indices in width_classes(op, work.context.spec):
        width = leaf_width(op.sites[indices[0]], work.context.spec)
        shape = (
            (num_rows, len(indices)) if op.kind is OperationKind.PROBE else (num_rows, len(indices), width)
        )
        buffer = torch.empty(shape, dtype=work.context.buffer_dtype(op), device=work.context.device)
        group.buffers.append(buffer)
        keys = [items[0].active.keys[index] for index in indices]
        # An earlier stage sends the values of its own sites.
        for places, keys_alike in with_rows_alike(keys, stage):
            sites = [indices[place] for place in places]
            if op.captures_states:
                _read_states(work, items, list(zip(places, sites, strict=True)), buffer, overflows)
            else:
                _add_reads(work, group, items, keys_alike, (sites, places), buffer, overflows)
    if overflows is not None:
        group.buffers.append(overflows)
    work.plan.reads.append(group)


def _add_reads(
    work: PlanInProgress,
    group: ReadGroup,
    items: list[OperationRows],
    keys: list[SiteKey],
    columns: tuple[list[int], list[int]],
    buffer: torch.Tensor,
    overflows: torch.Tensor | None,
) -> None:
    """Add the instructions; ``columns`` are the sites' indices, and their places in the buffer."""
    sites, places = columns
    order = [in_order(items[0].stages[site]) for site in sites]
    work.table.address(buffer)
    to = addresses(buffer, places)
    flags = None
    if overflows is not None:
        work.table.address(overflows)
        flags = addresses(overflows, sites)
    plain_reads = reads(buffer.dtype, len(sites))
    for item, piece in zip(items, group.slices, strict=True):
        part = slice(piece.start, piece.stop)
        words: dict[Word, Words | int] = {Word.OUT: to[:, part]}
        if flags is not None:
            words[Word.OVERFLOW] = flags[:, part]
        # Of a probe, the vector is its own.
        program = item.active.program
        instructions = plain_reads if program is None else program.select(sites)
        work.table.add(Block(item.member, keys, order, item.rows_at(keys[0]), instructions, words))


def _read_states(
    work: PlanInProgress,
    items: list[OperationRows],
    places: list[tuple[int, int]],
    buffer: torch.Tensor,
    overflows: torch.Tensor | None,
) -> None:
    """Plan kernels that read states; ``places`` are each site's column in the buffer, and its index."""
    rows = work.on_device(np.concatenate([item.rows for item in items]))
    for place, site in places:
        flags = None if overflows is None else overflows[:, site]
        kernel = GatherStates(rows, buffer[:, place], flags)
        group = KernelGroup(kernel, [item.member for item in items])
        work.staged[items[0].active.keys[site]].append((in_order(items[0].stages[site]), group))


_CHANGE: Final = Instructions.blank(1, Code.CHANGE)


def plan_writes(work: PlanInProgress, items: list[OperationRows]) -> None:
    """Plan the writes: ready programs, means, and changes of features, those at the same place together."""
    groups: dict[Any, list[ChangedRows]] = defaultdict(list)
    overflows = _overflows(work, items)
    for item in items:
        active, kind = item.active, item.active.op.kind
        if active.program is not None:
            _add_writes(work, item, active.program, overflows if kind in NARROWED_KINDS else None)
        elif kind is OperationKind.MEAN:
            _plan_mean(work, item)
        else:
            for index, key in enumerate(active.keys):
                if work.context.stage.has(key) and len(item.rows_at(key)):
                    inputs = None if active.source is None else _plan_source(work, item)
                    form = (active.features.dictionary, active.features.source)
                    changed = ChangedRows(item, key, inputs)
                    groups[(key, item.stages[index], *form)].append(changed)
    for (_, stage, *_), changes in groups.items():
        for batch in bounded(changes, lambda changed: changed.features, lambda changed: len(changed.rows)):
            _plan_changes(work, batch, stage, overflows)


def _plan_changes(
    work: PlanInProgress,
    changed: list[ChangedRows],
    stage: int,
    overflows: Overflows | None,
) -> None:
    """Plan a kernel that computes the changes of features, and instructions after it that add them."""
    key = changed[0].key
    sizes = [len(rows_changed.rows) for rows_changed in changed]
    # Zeros: what a kernel that raises has left is added.
    out = torch.zeros(sum(sizes), work.context.width(key), device=work.context.device)
    pieces = list(out.split(sizes))
    kernel = changes_of(changed, out)
    members = [rows_changed.item.member for rows_changed in changed]
    group = KernelGroup(kernel, members, lambda i: changes_of(changed[i : i + 1], pieces[i]))
    work.staged[key].append((in_order(stage), group))
    for rows_changed, piece in zip(changed, pieces, strict=True):
        work.table.address(piece)
        columns: dict[Word, Words | int] = {Word.OPERAND: addresses(piece.unsqueeze(1), [0])}
        order = [in_order(stage, is_last_part=True)]
        _add_write(work, rows_changed.item, [key], order, _CHANGE, columns, overflows)


def _plan_mean(work: PlanInProgress, item: OperationRows) -> None:
    """Plan to set rows to a mean over the prompt, which the step takes that has all of it."""
    active, request = item.active, item.span.request
    program = Instructions.blank(len(active.keys), Code.SET)
    if active.units is not None:
        program.words[:, Word.UNITS] = active.units.data_ptr()
        program.words[:, Word.COUNT] = len(active.units)
    for index, key in enumerate(active.keys):
        if not (work.context.stage.has(key) and len(item.rows_at(key))):
            continue
        place = (active.index, index)
        mean = request.means.get(place)
        if mean is None:
            source = item.rows if active.op.is_in_encoder else mean_rows(item, key)
            if source is None:
                request.fail(
                    "prompt_was_chunked",
                    "mean ablation needs the whole prompt in one step, and this engine splits it, by "
                    "--long-prefill-token-threshold or for a draft model's rows; raise "
                    "--max-num-batched-tokens",
                )
                return
            mean = torch.empty(active.widths[index], device=work.context.device)
            work.plan.means.append((request, place, mean))
            instruction = Instructions.blank(1, Code.MEAN)
            instruction.words[0, Word.UNITS] = work.table.address(work.on_device(source))
            instruction.words[0, Word.COUNT], instruction.words[0, Word.OUT] = (
                len(source),
                work.table.address(mean),
            )
            order = in_order(item.stages[index])
            work.table.add(Block(item.member, [key], [order], item.rows_at(key)[-1:], instruction, {}))
            work.table.wait(key, order)
        program.words[index, Word.OPERAND] = work.table.address(mean)
    _add_writes(work, item, program, None, is_last_part=True)


def _add_writes(
    work: PlanInProgress,
    item: OperationRows,
    program: Instructions,
    overflows: Overflows | None,
    *,
    is_last_part: bool = False,
) -> None:
    """Add the instructions of a write at the stage's sites, with the words that differ by row."""
    active = item.active
    for indices, keys in with_rows_alike(active.keys, work.context.stage):
        rows = item.rows_at(keys[0])
        if not len(rows):
            continue
        instructions = program.select(indices)
        columns: dict[Word, Words | int] = {}
        if active.op.kind in WITH_FACTORS:
            # Sites follow each other, so all of them may use the same.
            count = max(1, int(instructions.words[0, Word.COUNT]))
            factors = torch.empty(len(rows), count, device=work.context.device)
            columns[Word.OUT] = work.table.address(factors) + np.arange(len(rows)) * count * factors.itemsize
        if active.op.kind is OperationKind.PATCH:
            positions = np.searchsorted(
                np.asarray(active.op.where.positions, np.int64),
                item.offsets_at(keys[0]) + item.span.start,
            )
            columns[Word.OPERAND] = instructions.words[:, Word.OPERAND, None] + positions * patch_bytes(
                active
            )
        order = [in_order(item.stages[index], is_last_part=is_last_part) for index in indices]
        _add_write(work, item, keys, order, instructions, columns, overflows)


def _add_write(
    work: PlanInProgress,
    item: OperationRows,
    keys: list[SiteKey],
    order: list[int],
    program: Instructions,
    columns: dict[Word, Words | int],
    overflows: Overflows | None,
) -> None:
    """Add instructions at sites with the same rows, left out where their gate or mask is 0."""
    rows, gate, mask = item.rows_at(keys[0]), item.gate_at(keys[0]), item.mask_at(keys[0])
    if gate is not None:
        columns[Word.GATE] = work.table.address(gate[0]) + gate[1]
    elif mask is not None:
        columns[Word.GATE] = work.table.address(mask) + np.arange(len(rows))
    if overflows is not None:
        columns[Word.OVERFLOW] = work.table.address(overflows.flags_at(keys[0])) + rows
    work.table.add(Block(item.member, keys, order, rows, program, columns))


def _overflows(work: PlanInProgress, items: list[OperationRows]) -> Overflows | None:
    """Return new flags for changes beyond float16; None if no write of the step can make one."""
    items = [item for item in items if item.active.op.kind in NARROWED_KINDS]
    if work.context.dtype is not torch.float16 or not items:
        return None
    spans = {id(item.span): item.span for item in items}.values()
    flagged_rows = [
        FlaggedRows(span.request.request_id, span.row, span.row + span.num_rows) for span in spans
    ]
    overflows = Overflows.of(flagged_rows, work.plan.logits_rows, work.context.device)
    work.plan.overflows.append(overflows)
    return overflows


def _plan_source(work: PlanInProgress, item: OperationRows) -> torch.Tensor:
    """Plan the read of the values on which a write elsewhere depends; return them, ``[rows, width]``."""
    source, key = item.active.features.source, item.active.source
    if source is None or key is None:
        raise RuntimeError("the operation reads where it writes")
    width = leaf_width(source, work.context.spec)
    values = torch.empty(len(item.rows), width, device=work.context.device)
    work.table.address(values)
    to = {Word.OUT: addresses(values.unsqueeze(1), [0])}
    member, order = Member(item.span.request, item.active), [in_order(item.source_stage)]
    work.table.add(Block(member, [key], order, item.rows, reads(values.dtype, 1), to))
    return values
