"""Interventions on a GPU: an engine that decodes beside plain vLLM, or with `--part small` pieces of it.

*decode* is the table `serving` with a model of a billion random weights in bfloat16 and vLLM's defaults, so
with full CUDA graphs: throughput at 1, 8, 32 and 128 requests. It takes about ten minutes; see
`benchmarks/README.md` for what the machine needs. `--device cpu` has two small layers, to try the command.

*small*: traces on small layers, and plans on a stand-in for a model, with one thread of Python; each call
ends when the device has done its work. Traces: *ours* is a trace, *hooks* registers PyTorch hooks, runs and
removes them, *bare* is the model alone. Plans: *ours* is a step with its plan and the harvest of its results,
*plain* the step alone; that no step waits for the device before its results are taken is checked before.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Final

import torch

from benchmarks.case import BenchmarkCase, NotMeasuredError, Plan, Sampler
from benchmarks.decoding import TURN_STEPS
from benchmarks.interventions import (
    Content,
    LayerSizes,
    captured,
    conditional,
    every,
    first_only,
    middle,
    nothing,
    steered,
)
from benchmarks.plan_steps import plan_cases
from benchmarks.random_model import BILLION, TWO_LAYERS, write_random_model
from benchmarks.tables.serving import ANY_SIZE, Variant, chosen, plan_of
from benchmarks.tables.tracing import small_cases

_BATCHES: Final = (1, 8, 64)
_QUICK_CASES: Final = 3
_DECODING: Final = (1, 8, 32, 128)
_NO_GPU: Final = (
    f"torch {torch.__version__} finds no CUDA GPU here; run this where there is one, with a torch built for "
    "it; --device cpu runs it without one"
)


def _mixed(index: int, shape: LayerSizes) -> Content:
    """Give neighbours different operations, each with a vector of its own."""
    kinds = (steered(middle), conditional(every), captured(every, "generated", "last"), steered(every))
    return kinds[index % len(kinds)](index, shape)


VARIANTS: Final = (
    Variant("(control: plain vLLM again)", nothing, is_control=True),
    Variant("idle", nothing, {ANY_SIZE: 0.99}),
    Variant("one request steered, one layer", first_only(steered(middle)), {ANY_SIZE: 0.97}),
    Variant("every request its own vector, one layer", steered(middle), {ANY_SIZE: 0.97}),
    Variant("every request its own vector, all layers", steered(every), {ANY_SIZE: 0.93}),
    Variant("every request its own condition, one layer", conditional(middle), {ANY_SIZE: 0.96}),
    Variant("last token captured, all layers", captured(every, "generated", "last"), {ANY_SIZE: 0.93}),
    Variant("every request another configuration", _mixed, {ANY_SIZE: 0.95}),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the device and the part."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", choices=["decode", "small"], default="decode")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="cases of decode by name")
    parser.add_argument("--steps", type=int, default=48, help=f"timed steps, a multiple of {TURN_STEPS}")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    return _small(args) if args.part == "small" else _decode(args, stack)


def _decode(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    has_gpu = args.device == "cuda"
    if has_gpu and not torch.cuda.is_available():
        raise NotMeasuredError(_NO_GPU)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_random_model(folder, BILLION if has_gpu else TWO_LAYERS)
    batches = _DECODING if has_gpu and not args.quick else (2,)
    workloads = chosen(VARIANTS, batches, [16], args.only, None)
    mode = "compiled" if has_gpu else "eager"
    found = plan_of(workloads, args, mode, str(folder), is_random=True)
    return dataclasses.replace(found, suffix=f"-decode-{args.device}")


def _small(args: argparse.Namespace) -> Plan:
    torch.set_num_threads(1)
    device = torch.device(args.device)
    small = small_cases((64,), ())[:_QUICK_CASES] if args.quick else small_cases()
    cases = [*small, *plan_cases(device, (8,) if args.quick else _BATCHES)]

    def placed(case: BenchmarkCase) -> BenchmarkCase:
        """Return a case whose model and inputs are made on the device."""

        def make() -> Sampler:
            if device.type == "cuda" and not torch.cuda.is_available():
                raise NotMeasuredError(_NO_GPU)
            with torch.device(device):
                return case.make()

        return dataclasses.replace(case, size=f"{case.size}, {device.type}", make=make)

    return Plan([placed(case) for case in cases], f"-{device.type}")
