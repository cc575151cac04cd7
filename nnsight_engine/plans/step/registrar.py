"""Creates the worker's state of requests from their plans, and holds their vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from nnsight_engine.core.detector import Form
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import EXPERTS
from nnsight_engine.core.tensors import tensor_from_bytes
from nnsight_engine.plans.request_plan import (
    OperationKind,
    PlannedFeatures,
    PlannedOp,
    PlannedScore,
    PlannedSite,
    PlannedTest,
    RequestPlan,
    TensorData,
)
from nnsight_engine.plans.step.active import (
    MLP_OUTPUT,
    Acquired,
    ActiveOp,
    ActiveRequest,
    ActiveScore,
    ActiveTest,
    BankKey,
)
from nnsight_engine.plans.step.banks import (
    SLOT_BYTES,
    DictionaryBank,
    LoadedDictionary,
    ScoreSlots,
    slot_size,
)
from nnsight_engine.plans.step.context import StepContext, site_key
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.table import ALONG_VECTOR, IN_FLOAT32, own_program
from nnsight_engine.plans.step.token_masks import AnswerTracker
from nnsight_engine.plans.where import generated_is_constant, last_position

_AS_WIDE: Final = {
    Form.LINEAR: ("weights",),
    Form.MLP: ("hidden_weights",),
    Form.DISTANCE: ("mean", "scale"),
}
"""The tensors of each form of a score that are as wide as the value."""

_STACKS = frozenset({OperationKind.PATCH, OperationKind.SUBSPACE})
"""Kinds whose tensor has several rows for one site."""


class VectorBank:
    """Vectors of live requests, held once for all, in the form that a kernel needs (scaled, normalized)."""

    def __init__(self) -> None:
        self._tensors: dict[BankKey, torch.Tensor] = {}
        self._num_users: dict[BankKey, int] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def acquire(self, key: BankKey, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a vector and add a user; ``make`` is called if no other request uses it."""
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = make()
        self._num_users[key] = self._num_users.get(key, 0) + 1
        return tensor

    def release(self, keys: list[BankKey]) -> None:
        for key in keys:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._tensors[key]


class Registrar:
    """Registers requests; ``failed`` are the ids of those that have failed, shared with their state."""

    def __init__(self, context: StepContext) -> None:
        self.bank = VectorBank()
        self.slots = ScoreSlots(context.device)
        self.dictionaries = DictionaryBank(
            context.device, context.spec.max_dictionary_bytes, context.fails_anywhere
        )
        self.failed: set[str] = set()
        self._context = context

    def register(
        self, request_id: str, plan: RequestPlan, tensors: dict[str, tuple[str, list[int], bytes]]
    ) -> ActiveRequest:
        """Move a plan's tensors to the device; if it raises InterventionError, no tensor stays acquired."""
        contents = {
            key: TensorData(dtype, tuple(shape), data) for key, (dtype, shape, data) in tensors.items()
        }
        acquired = Acquired()
        num_slots = sum(test.has_slot for op in plan.ops if op.when is not None for test in op.when.tests)
        try:
            self._context.ledger.reserve(
                request_id, num_slots * SLOT_BYTES * slot_size(max(1, plan.num_positions))
            )
            ops = [self._activate(op, index, plan, contents, acquired) for index, op in enumerate(plan.ops)]
        except BaseException:
            self._release(acquired)
            self._context.ledger.release(request_id)
            raise
        # Steps that repeat a plan look at no token, so parts of the answer could not be followed.
        steady = plan.answer is None and all(_is_steady(op, plan.prompt_len) for op in ops)
        return ActiveRequest(
            request_id,
            plan,
            ops,
            acquired,
            steady,
            charged_position=plan.prompt_len,
            failed=self.failed,
            answer=None if plan.answer is None else AnswerTracker(plan.answer, plan.prompt_len),
        )

    def forget(self, request: ActiveRequest) -> None:
        self.failed.discard(request.request_id)
        self._release(request.acquired)
        request.acquired = Acquired()

    def _release(self, acquired: Acquired) -> None:
        self.bank.release(acquired.vectors)
        for slot in acquired.slots:
            self.slots.release(slot)
        for dictionary in acquired.dictionaries:
            self.dictionaries.release(dictionary)

    def _activate(
        self,
        op: PlannedOp,
        index: int,
        plan: RequestPlan,
        contents: dict[str, TensorData],
        acquired: Acquired,
    ) -> ActiveOp:
        """Return an operation on the device; what it takes is noted in ``acquired``, even if this raises."""

        def load(features: PlannedFeatures | None) -> LoadedDictionary | None:
            if features is None:
                return None
            loaded = self.dictionaries.acquire(features.dictionary, plan.dictionaries)
            acquired.dictionaries.append(features.dictionary)
            return loaded

        def score_of(planned: PlannedScore) -> ActiveScore:
            loaded = tuple(load(part.features) for part in planned.parts)
            return self._score(planned, contents, acquired, loaded)

        def active_test(test: PlannedTest) -> ActiveTest:
            slot = None
            if test.has_slot:
                slot = self.slots.acquire(plan.num_positions)
                acquired.slots.append(slot)
            return ActiveTest(test, score_of(test.score), slot)

        widths = tuple(self._width(site) for site in op.sites)
        tensor = self._operand(op, contents, widths, acquired)
        units = None if op.units is None else to_device(np.array(op.units, np.int64), self._context.device)
        keys = tuple(site_key(site) for site in op.sites)
        constant = generated_is_constant(op.where, plan.prompt_len, plan.prompt_len)
        score = None if op.score is None else score_of(op.score)
        tests = () if op.when is None else tuple(active_test(test) for test in op.when.tests)
        loaded, source = load(op.features), None
        if op.features is not None and op.features.source is not None:
            source = site_key(op.features.source)
            if self._context.stage.has(source) != self._context.stage.has(keys[0]):
                raise InterventionError(
                    "unsupported_combination",
                    f"the transcoder reads {op.features.source} and writes {op.sites[0]}, which are on "
                    "different pipeline stages of this server",
                )
        if op.kind is OperationKind.FEATURE and loaded is not None:
            tensor = self._constant_change(op, loaded)
        program = own_program(op, tensor, units)
        return ActiveOp(
            op, index, keys, tensor, units, constant, widths, score, tests, loaded, source, program
        )

    def _constant_change(self, op: PlannedOp, loaded: LoadedDictionary) -> torch.Tensor | None:
        """Return what changes of features add, ``[1, width]``, if that is the same at all positions."""
        features = op.features
        # A change beyond float16 is found where it is made, without a wait for the device.
        is_narrow = self._context.dtype is torch.float16
        if features is None or is_narrow or any(gain != 1 for gain in features.gains):
            return None
        offsets = to_device(np.asarray(features.offsets, np.float32), self._context.device)
        change = loaded.selection(features.ids).constant_move(offsets)
        return None if change is None else change.to(self._context.dtype).unsqueeze(0)

    def _operand(
        self,
        op: PlannedOp,
        contents: dict[str, TensorData],
        widths: tuple[int, ...],
        acquired: Acquired,
    ) -> torch.Tensor | None:
        """Return an operation's tensor from the bank, as its kernel needs it; None if it has none."""
        if op.kind is OperationKind.ZERO:
            return torch.zeros(1, max(widths), dtype=self._context.dtype, device=self._context.device)
        if not op.tensor:
            return None
        scale = (
            op.scale
            if op.kind in {OperationKind.ADD, OperationKind.NORM_MATCH, OperationKind.REPLACE}
            else 1.0
        )
        # A vector for all layers and a stack of one per layer differ in shape only: one key fits both.
        dtype = self._operand_dtype(op)
        key = (op.tensor, f"{op.kind} {dtype}", scale)
        tensor = self.bank.acquire(key, lambda: self._prepare(op, contents[op.tensor], scale).to(dtype))
        acquired.vectors.append(key)
        _check_width(op, tensor, widths)
        return tensor

    def _score(
        self,
        planned: PlannedScore,
        contents: dict[str, TensorData],
        acquired: Acquired,
        loaded: tuple[LoadedDictionary | None, ...],
    ) -> ActiveScore:
        """Return a score with its tensors on the device; ``loaded`` are its parts' dictionaries or None."""

        def on_device(name: str) -> torch.Tensor:
            content = contents[name]
            host = tensor_from_bytes(content.dtype, content.shape, content.data)
            key = (name, "detector", 1.0)
            tensor = self.bank.acquire(key, lambda: to_device(host, self._context.device).to(torch.float32))
            acquired.vectors.append(key)
            return tensor

        tensors = []
        for part in planned.parts:
            by_name = {name: on_device(key) for name, key in part.tensors}
            width = self._width(part.site)
            as_wide = _AS_WIDE[part.form] if part.form is not None else ()
            if any(tensor.shape[-1] != width for name, tensor in by_name.items() if name in as_wide):
                raise InterventionError("wrong_width", f"{part.site} has width {width}, the detector has not")
            if part.form is Form.MLP:
                names = dict(part.tensors)
                key = (names["hidden_bias"], names["weights"], 1.0)
                pair = (by_name["hidden_bias"], by_name["weights"])
                by_name[MLP_OUTPUT] = self.bank.acquire(key, functools.partial(torch.stack, pair))
                acquired.vectors.append(key)
            tensors.append(by_name)
        keys = tuple(site_key(site) for site in planned.sites)
        return ActiveScore(planned, keys, tuple(tensors), loaded)

    def _prepare(self, op: PlannedOp, content: TensorData, scale: float) -> torch.Tensor:
        """Return a tensor on the device as ``[1 or sites, …]``, scaled, directions with length 1."""
        host = tensor_from_bytes(content.dtype, content.shape, content.data)
        tensor = to_device(host, self._context.device).to(torch.float32)
        if op.kind not in _STACKS:
            tensor = tensor.reshape(-1, tensor.shape[-1])
        elif tensor.ndim == len(("rows", "width")):
            tensor = tensor.unsqueeze(0)
        if op.kind in ALONG_VECTOR:
            tensor = tensor / tensor.norm(dim=-1, keepdim=True)
        return tensor * scale

    def _operand_dtype(self, op: PlannedOp) -> torch.dtype:
        """Return the dtype of an operation's tensor; ids of experts are exact in float32."""
        is_ids = op.sites[0].leaf == EXPERTS
        return torch.float32 if op.kind in IN_FLOAT32 or is_ids else self._context.dtype

    def _width(self, site: PlannedSite) -> int:
        leaf = self._context.spec.leaf(site.leaf, site.layer)
        if leaf is None or site.layer >= self._context.spec.num_layers_of(site.leaf):
            raise InterventionError("unknown_point", f"the model has no point {site}")
        return leaf.width


def _is_steady(active: ActiveOp, prompt_len: int) -> bool:
    """Return whether an operation does the same at every generated position; steps can then share a plan."""
    if active.op.captures_patterns:
        # An open pattern capture stores the keys of each step, so no step equals the one before.
        last = last_position(active.op.where, prompt_len)
        return last is not None and last < prompt_len
    return active.constant is not None


def _check_width(op: PlannedOp, tensor: torch.Tensor, widths: tuple[int, ...]) -> None:
    for site, width in zip(op.sites, widths, strict=True):
        if tensor.shape[-1] != width:
            raise InterventionError(
                "wrong_width", f"{site} has width {width}, the tensor has {tensor.shape[-1]}"
            )
