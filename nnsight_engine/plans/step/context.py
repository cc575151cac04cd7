"""What all plans of a worker share: its sites of the model, and the ledger of captured bytes.

The sites are all, or those of its stage of a pipeline. Captured bytes are reserved before they are allocated;
a request that would exceed its own or the engine's limit fails.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Final

import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.operator_choices import tap_of
from nnsight_engine.core.tensors import DTYPES
from nnsight_engine.plans.records import feature_row_bytes, leaf_width
from nnsight_engine.plans.request_plan import LOGITS, OperationKind, PlannedOp, PlannedSite
from nnsight_engine.plans.step.banks import FailsAnywhere, is_failure
from nnsight_engine.plans.step.read_kernels import FormOf

SiteKey = int | PlannedSite
"""The number of a tap (0 before the first layer, i + 1 after layer i), or any other site as it is."""


def site_key(site: PlannedSite) -> SiteKey:
    """Return the canonical key of a site: the end of layer i and the start of layer i + 1 are one tap."""
    tap = tap_of(site.leaf, site.layer)
    return site if tap is None else tap


def name_of(key: SiteKey) -> str:
    if not isinstance(key, int):
        return str(key)
    return str(PlannedSite("output", key - 1) if key else PlannedSite("input", 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """The layers of a pipeline stage, from ``start`` up to ``stop``, which is None on the last stage."""

    start: int = 0
    stop: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether the worker has the model's end, where tokens are sampled and results are collected."""
        return self.stop is None

    def has(self, key: SiteKey) -> bool:
        """Return whether the stage reaches a site; the last stage has those of the whole model."""
        if isinstance(key, int):
            layer = max(0, key - 1)
        elif key.layer >= 0:
            layer = key.layer
        else:
            return self.is_last
        return self.start <= layer and (self.stop is None or layer < self.stop)


WHOLE: Final = Stage()
"""The part of a worker that has the whole model."""


@dataclasses.dataclass(slots=True)
class StepBytes:
    """Bytes of one request's reads in one step: ``kept`` until it ends, ``scratch`` during the step."""

    kept: int = 0
    scratch: int = 0


class ByteLedger:
    """Counts the captured bytes of each request and of all; ``total_bytes`` includes those of streaks."""

    def __init__(self, *, max_request_bytes: int, max_engine_bytes: int) -> None:
        self._max_request_bytes = max_request_bytes
        self._max_engine_bytes = max_engine_bytes
        self._held: dict[str, int] = {}
        self.total_bytes = 0

    def reserve(self, request_id: str, num_bytes: int) -> None:
        """Add ``num_bytes`` to the request's count, or raise InterventionError and count nothing."""
        held_bytes = self._held.get(request_id, 0)
        if held_bytes + num_bytes > self._max_request_bytes:
            raise InterventionError(
                "capture_too_large",
                f"one request may capture {self._max_request_bytes} bytes, this one asked for "
                f"{held_bytes + num_bytes}; capture fewer points or positions, or use `reduce`",
            )
        if self.total_bytes + num_bytes > self._max_engine_bytes:
            raise InterventionError(
                "engine_capture_full",
                f"all requests together may hold {self._max_engine_bytes} captured bytes, "
                f"{self.total_bytes} are held and this request asked for {num_bytes} more; try again later",
            )
        self._held[request_id] = held_bytes + num_bytes
        self.total_bytes += num_bytes

    def reserve_all(self, num_bytes: int) -> bool:
        """Reserve bytes for several requests, within their own limits; False beyond the engine's limit."""
        if self.total_bytes + num_bytes > self._max_engine_bytes:
            return False
        self.total_bytes += num_bytes
        return True

    def give_back_all(self, num_bytes: int) -> None:
        self.total_bytes -= num_bytes

    def assign(self, request_id: str, num_bytes: int) -> None:
        """Attribute bytes to a request that were reserved for several requests together."""
        self._held[request_id] = self._held.get(request_id, 0) + num_bytes

    def num_steps(self, request_id: str, kept: int, scratch: int) -> int:
        """Return how many more steps fit into the request's limit; ``scratch`` is free again after each."""
        room = self._max_request_bytes - self._held.get(request_id, 0) - scratch
        if room < kept:
            return 0
        return room // kept if kept else sys.maxsize

    def give_back(self, request_id: str, num_bytes: int) -> None:
        if request_id in self._held:
            self._held[request_id] -= num_bytes
            self.total_bytes -= num_bytes

    def release(self, request_id: str) -> None:
        """Release all bytes of the request; a request that never captured is no error."""
        self.total_bytes -= self._held.pop(request_id, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class StepContext:
    """The model of a worker; ``dtype`` is also that of its keys and of captures without one.

    ``is_asynchronous``: a step is planned before the drafts of the step before are judged. ``fails_anywhere``
    returns whether any rank of the same layers has a failure, given this rank's.
    """

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    ledger: ByteLedger
    form_of: FormOf
    is_asynchronous: bool = False
    stage: Stage = WHOLE
    fails_anywhere: FailsAnywhere = is_failure

    def width(self, key: SiteKey) -> int:
        return self.spec.hidden_size if isinstance(key, int) else leaf_width(key, self.spec)

    def row_bytes(self, op: PlannedOp) -> int:
        width = sum(leaf_width(site, self.spec) for site in op.sites)
        return width * self.capture_dtype(op).itemsize

    def capture_dtype(self, op: PlannedOp) -> torch.dtype:
        # A mean is summed in float32, whatever dtype it is returned in.
        if op.reduce == "mean":
            return torch.float32
        return DTYPES[op.dtype] if op.dtype else self.dtype

    def buffer_dtype(self, op: PlannedOp) -> torch.dtype:
        if op.kind in {OperationKind.PROBE, OperationKind.FEATURES}:
            return torch.float32
        return self.capture_dtype(op) if op.kind is OperationKind.CAPTURE else self.dtype

    def count_rows(self, reserved: StepBytes, op: PlannedOp, num_rows: int) -> None:
        """Add an operation's bytes on ``num_rows`` rows to a step's; writes need some at logits only."""
        if LOGITS in op.sites:
            # The full logits rows, of which a probe keeps one number each.
            reserved.scratch += num_rows * self.spec.vocab_size * self.dtype.itemsize
        match op.kind:
            case OperationKind.CAPTURE:
                if op.reduce == "none":
                    reserved.kept += num_rows * self.row_bytes(op)
                else:
                    reserved.scratch += num_rows * self.row_bytes(op)
            case OperationKind.PROBE:
                reserved.kept += num_rows * len(op.sites) * torch.float32.itemsize
            case OperationKind.LENS:
                rows = num_rows * len(op.sites)
                reserved.scratch += rows * self.spec.hidden_size * self.dtype.itemsize
                # Of each token an id or a rank, and a log-probability, four bytes each.
                reserved.kept += rows * 8 * (op.top_k + len(op.targets))
            case OperationKind.DETECT:
                reserved.kept += num_rows * torch.float32.itemsize
            case OperationKind.FEATURES:
                reserved.scratch += num_rows * leaf_width(op.sites[0], self.spec) * torch.float32.itemsize
                reserved.kept += num_rows * feature_row_bytes(op)
            case _:
                reserved.kept += num_rows * (op.when is not None)
