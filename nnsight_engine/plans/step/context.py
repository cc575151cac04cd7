from __future__ import annotations

import dataclasses

import torch

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensor_bytes import DTYPES
from nnsight_engine.plans.records import feature_row_bytes, leaf_width
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp
from nnsight_engine.plans.sites import LOGITS
from nnsight_engine.plans.step.dictionary_bank import FailsAnywhere, is_failure
from nnsight_engine.plans.step.ledger import ByteLedger, StepBytes
from nnsight_engine.plans.step.patterns import FormOf
from nnsight_engine.plans.step.stage import WHOLE, SiteKey, Stage


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
                reserved.kept += rows * 8 * (op.top_k + len(op.targets))
            case OperationKind.DETECT:
                reserved.kept += num_rows * torch.float32.itemsize
            case OperationKind.FEATURES:
                reserved.scratch += num_rows * leaf_width(op.sites[0], self.spec) * torch.float32.itemsize
                reserved.kept += num_rows * feature_row_bytes(op)
            case _:
                reserved.kept += num_rows * (op.when is not None)
