"""Triton without a GPU: its interpreter runs vLLM's kernels, which is what model runner V2 needs on a CPU.

Triton decides at its import whether kernels are interpreted, by a variable that ``engine_kinds`` sets. vLLM
looks for Triton's backend of CPUs at its own import, so ``install`` is called before that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch._inductor.config as inductor
from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle, interpreter_builder
from typing_extensions import override


class BooleanMasks(InterpreterBuilder):
    """The interpreter, for kernels whose masks are integers."""

    @override
    def create_masked_load(self, ptrs: Any, mask: TensorHandle, *others: Any) -> Any:
        return super().create_masked_load(ptrs, _as_bool(mask), *others)

    @override
    def create_masked_store(self, ptrs: Any, value: Any, mask: TensorHandle, *others: Any) -> Any:
        return super().create_masked_store(ptrs, value, _as_bool(mask), *others)


class Backend:
    """Stands for a backend of Triton for CPUs, of which vLLM asks only whether its driver is active."""

    class driver:  # noqa: N801 - an attribute of Triton's backends
        """The driver."""

        @staticmethod
        def is_active() -> bool:
            """Return that it is."""
            return True


def _places_of_nan(self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """Find the largest or smallest value, also where all are NaN: numpy raises, a GPU returns a place."""
    values = values[0] if isinstance(values, tuple) else values
    data = values.handle.data
    if idx_reduce_op is not None and np.issubdtype(data.dtype, np.floating):
        last = -np.inf if idx_reduce_op is np.nanargmax else np.inf
        values = self.to_tensor(np.where(np.isnan(data), last, data), values.dtype)
    return _min_max(self, values, val_reduce_op, idx_reduce_op)


_min_max = ReduceOps.min_max


def install() -> None:
    """Have vLLM's kernels interpreted in this process."""
    ReduceOps.min_max = _places_of_nan
    interpreter_builder.__class__ = BooleanMasks  # Triton's modules share the instance
    backends["cpu"] = Backend
    inductor.triton_disable_device_detection = True  # it would ask that backend for a target


def _as_bool(mask: TensorHandle) -> TensorHandle:
    return TensorHandle(mask.data.astype(bool), mask.dtype)
