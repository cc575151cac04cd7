"""Interventions on a GPU: traces on small layers, and plans on a stand-in for a model.

With one thread of Python; each call ends when the device has done its work. Traces: *ours* is a trace,
*hooks* registers PyTorch hooks, runs and removes them, *bare* is the model alone. Plans: *ours* is a step
with its plan and the harvest of its results, *plain* the step alone; that no step waits for the device
before its results are taken is checked before. `--device cpu` runs it without a GPU; the table `serving`
compares with vLLM as it runs there by default.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Final

import torch

from benchmarks.case import BenchmarkCase, NotMeasuredError, Plan, Sampler
from benchmarks.plan_steps import plan_cases
from benchmarks.tables.tracing import small_cases

_BATCHES: Final = (1, 8, 64)
_QUICK_CASES: Final = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option of the device."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")


def plan(args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    torch.set_num_threads(1)
    device = torch.device(args.device)
    small = small_cases((64,), ())[:_QUICK_CASES] if args.quick else small_cases()
    cases = [*small, *plan_cases(device, (8,) if args.quick else _BATCHES)]

    def placed(case: BenchmarkCase) -> BenchmarkCase:
        """Return a case whose model and inputs are made on the device."""

        def make() -> Sampler:
            if device.type == "cuda" and not torch.cuda.is_available():
                raise NotMeasuredError(
                    f"torch {torch.__version__} finds no CUDA GPU here; run this where there is one, with a "
                    "torch built for it; --device cpu runs it without one"
                )
            with torch.device(device):
                return case.make()

        return dataclasses.replace(case, size=f"{case.size}, {device.type}", make=make)

    return Plan([placed(case) for case in cases], f"-{device.type}")
