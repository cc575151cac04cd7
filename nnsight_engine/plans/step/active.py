"""Worker-side state of a live request with interventions.

A request is registered when the scheduler first sends it and removed when the scheduler reports it
finished. A preempted request stays registered and keeps the positions that it has already delivered:
the rebuilt KV cache gets the request's writes again, and each read is delivered once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.leaves import EXPERTS
from nnsight_engine.core.tensor_bytes import tensor_from_bytes
from nnsight_engine.plans.records import Failure, StepInfo
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, PlannedSite, RequestPlan, TensorData
from nnsight_engine.plans.step.answer_tracker import AnswerTracker
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.patterns import PatternState
from nnsight_engine.plans.step.stage import SiteKey, site_key
from nnsight_engine.plans.where import generated_is_constant, last_position

BankKey = tuple[str, str, float]

_ALONG_VECTOR = frozenset({OperationKind.NORM_MATCH, OperationKind.PROJECT})
_IN_FLOAT32 = _ALONG_VECTOR | {OperationKind.SUBSPACE, OperationKind.PROBE}
_STACKS = frozenset({OperationKind.PATCH, OperationKind.SUBSPACE})
"""Kinds whose tensor has several rows for one site."""


@dataclasses.dataclass(slots=True)
class ActiveOp:
    """One operation of a live request, with its tensors on the device.

    Attributes:
        op: The operation.
        index: Its index in the plan.
        keys: Canonical key of each of its sites, see ``site_key``.
        tensor: Operand of the kernel: ``[1 or sites, width]``, for patches ``[1 or sites, positions,
            width]``, for subspaces ``[1 or sites, k, width]``; None where the operation has none.
        units: Selected units as an index tensor, or None.
        constant: Whether it acts on every generated position (True), on none (False), or on
            some (None).
        widths: Width of each site's value.
    """

    op: PlannedOp
    index: int
    keys: tuple[SiteKey, ...]
    tensor: torch.Tensor | None
    units: torch.Tensor | None
    constant: bool | None
    widths: tuple[int, ...]

    def tensor_at(self, site_index: int) -> torch.Tensor:
        """Return the tensor for the op's ``site_index``-th site."""
        if self.tensor is None:
            raise InterventionError("intervention_failed", f"{self.op.kind} carries no tensor")
        own = self.tensor[site_index if len(self.tensor) > 1 else 0]
        return own[..., : self.widths[site_index]]


@dataclasses.dataclass(slots=True)
class ActiveRequest:
    """One live request: its operations and its progress.

    During a run of steady steps (``steady_run``) progress is counted for all requests together; it is added
    here when the run is settled. ``failed`` holds the ids of all live requests that have failed, this one
    included; the set is shared by all requests of a registrar. ``delivery_s`` belongs to the thread that
    delivers results, everything else to the thread that runs steps.

    Once a request has had drafts, the worker does not know how many of its rows were accepted:
    ``end_position`` is a lower bound then, which moves by the rows that are no drafts. ``charged_position``
    is where rows begin whose captures have not been charged; ``num_drafts`` is the number of drafts of its
    last step. ``encoded`` are the images for which the vision encoder has run with the request's operations.
    """

    request_id: str
    plan: RequestPlan
    ops: list[ActiveOp]
    bank_keys: list[BankKey]
    steady: bool
    has_drafts: bool = False
    charged_position: int = 0
    num_drafts: int = 0
    first_position: int = -1
    end_position: int = 0
    recomputed_tokens: int = 0
    tier: str = "tap"
    spent_s: float = 0.0
    delivery_s: float = 0.0
    failure: Failure | None = None
    reductions: set[int] = dataclasses.field(default_factory=set)
    means: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    patterns: PatternState = dataclasses.field(default_factory=PatternState)
    failed: set[str] = dataclasses.field(default_factory=set)
    answer: AnswerTracker | None = None
    encoded: set[int] = dataclasses.field(default_factory=set)

    def info(self) -> StepInfo:
        """Return the progress so far, for the response's provenance."""
        spent_s = self.spent_s + self.delivery_s
        return StepInfo(self.first_position, self.end_position, self.recomputed_tokens, self.tier, spent_s)

    def advance(self, start: int, stop: int, num_drafts: int = 0) -> None:
        """Record that positions from ``start`` to ``stop`` were computed, the last of them for drafts."""
        if self.first_position < 0:
            self.first_position = start
            self.end_position = start
        self.num_drafts = num_drafts
        self.has_drafts |= num_drafts > 0
        stop -= num_drafts
        # A start within the prompt is exact, also one behind rows from the prefix cache.
        if self.has_drafts and start > max(self.end_position, self.plan.prompt_len):
            start, stop = self.end_position, stop - (start - self.end_position)
        self.recomputed_tokens += max(0, min(self.end_position, stop) - start)
        self.end_position = max(self.end_position, stop)

    def fail(self, code: str, message: str) -> None:
        """Mark the request as failed; later calls keep the first reason."""
        if self.failure is None:
            self.failure = Failure(code, message)
            self.failed.add(self.request_id)


class VectorBank:
    """Vectors of live requests, each held once for all requests that use it.

    A key has the hash of the content, the derivation and the scale: the form that a kernel needs (scaled,
    normalized) is derived once. Requests acquire at registration and release at their end; a vector without
    users is freed at once.
    """

    def __init__(self) -> None:
        self._tensors: dict[BankKey, torch.Tensor] = {}
        self._num_users: dict[BankKey, int] = {}

    def __len__(self) -> int:
        """Return the number of tensors held."""
        return len(self._tensors)

    def acquire(self, key: BankKey, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor for ``key``, created by ``make`` on first use, and add a user."""
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = make()
        self._num_users[key] = self._num_users.get(key, 0) + 1
        return tensor

    def release(self, keys: list[BankKey]) -> None:
        """Remove one user of each key; without users the tensor is freed."""
        for key in keys:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._tensors[key]


class Registrar:
    """Creates active requests from plans.

    Args:
        context: The model.

    Attributes:
        bank: The requests' vectors.
        failed: Ids of the live requests that have failed.
    """

    def __init__(self, context: StepContext) -> None:
        self.bank = VectorBank()
        self.failed: set[str] = set()
        self._context = context

    def register(
        self, request_id: str, plan: RequestPlan, tensors: dict[str, tuple[str, list[int], bytes]]
    ) -> ActiveRequest:
        """Move a plan's tensors to the device and return the active request.

        Raises:
            InterventionError: ``unknown_point`` or ``wrong_width``; no tensor stays acquired.
        """
        contents = {
            key: TensorData(dtype, tuple(shape), data) for key, (dtype, shape, data) in tensors.items()
        }
        bank_keys: list[BankKey] = []
        try:
            ops = [
                self._activate(op, index, plan.prompt_len, contents, bank_keys)
                for index, op in enumerate(plan.ops)
            ]
        except BaseException:
            self.bank.release(bank_keys)
            raise
        steady = all(_is_steady(op, plan.prompt_len) for op in ops)
        return ActiveRequest(
            request_id,
            plan,
            ops,
            bank_keys,
            steady,
            charged_position=plan.prompt_len,
            failed=self.failed,
            answer=None if plan.answer is None else AnswerTracker(plan.answer, plan.prompt_len),
        )

    def forget(self, request: ActiveRequest) -> None:
        """Release the request's vectors."""
        self.failed.discard(request.request_id)
        self.bank.release(request.bank_keys)
        request.bank_keys = []

    def _activate(
        self,
        op: PlannedOp,
        index: int,
        prompt_len: int,
        contents: dict[str, TensorData],
        bank_keys: list[BankKey],
    ) -> ActiveOp:
        tensor = None
        widths = tuple(self._width(site) for site in op.sites)
        if op.kind is OperationKind.ZERO:
            tensor = torch.zeros(1, max(widths), dtype=self._context.dtype, device=self._context.device)
        elif op.tensor:
            scale = (
                op.scale
                if op.kind in {OperationKind.ADD, OperationKind.NORM_MATCH, OperationKind.REPLACE}
                else 1.0
            )
            # A vector for all layers and a stack of one per layer differ in shape only: one key fits both.
            dtype = self._operand_dtype(op)
            key = (op.tensor, f"{op.kind} {dtype}", scale)
            tensor = self.bank.acquire(key, lambda: self._prepare(op, contents[op.tensor], scale).to(dtype))
            bank_keys.append(key)
            _check_width(op, tensor, widths)
        units = None if op.units is None else to_device(np.array(op.units, np.int64), self._context.device)
        keys = tuple(site_key(site) for site in op.sites)
        constant = generated_is_constant(op.where, prompt_len, prompt_len)
        return ActiveOp(op, index, keys, tensor, units, constant, widths)

    def _prepare(self, op: PlannedOp, content: TensorData, scale: float) -> torch.Tensor:
        host = tensor_from_bytes(content.dtype, content.shape, content.data)
        tensor = to_device(host, self._context.device).to(torch.float32)
        if op.kind not in _STACKS:
            tensor = tensor.reshape(-1, tensor.shape[-1])
        elif tensor.ndim == len(("rows", "width")):
            tensor = tensor.unsqueeze(0)
        if op.kind in _ALONG_VECTOR:
            tensor = tensor / tensor.norm(dim=-1, keepdim=True)
        return tensor * scale

    def _operand_dtype(self, op: PlannedOp) -> torch.dtype:
        """Return the dtype of an operation's tensor; ids of experts are exact in float32."""
        is_ids = op.sites[0].leaf == EXPERTS
        return torch.float32 if op.kind in _IN_FLOAT32 or is_ids else self._context.dtype

    def _width(self, site: PlannedSite) -> int:
        leaf = self._context.spec.leaf(site.leaf, site.layer)
        if leaf is None or site.layer >= self._context.spec.num_layers_of(site.leaf):
            raise InterventionError("unknown_point", f"the model has no point {site}")
        return leaf.width


def _is_steady(active: ActiveOp, prompt_len: int) -> bool:
    """Return whether the operation does the same in every decode step."""
    if active.op.captures_patterns:
        # An open pattern capture stores the keys of each step, so no step equals the one before.
        last = last_position(active.op.where, prompt_len)
        return last is not None and last < prompt_len
    is_mean = active.op.kind is OperationKind.MEAN and not active.op.is_in_encoder
    return active.constant is not None and not is_mean


def _check_width(op: PlannedOp, tensor: torch.Tensor, widths: tuple[int, ...]) -> None:
    for site, width in zip(op.sites, widths, strict=True):
        if tensor.shape[-1] != width:
            raise InterventionError(
                "wrong_width", f"{site} has width {width}, the tensor has {tensor.shape[-1]}"
            )
