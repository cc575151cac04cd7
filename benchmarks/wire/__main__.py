"""What sending a trace costs, beside cloudpickle, and saves, beside copying them, on one thread.

    python -m benchmarks.wire [--repeats 60] [--quick]

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import cloudpickle  # noqa: TID251 - what is compared with
import torch
from rich.console import Console

from benchmarks.machine import announced_machine
from benchmarks.tracing.report import Report
from benchmarks.tracing.timing import CallsByTurns, Case, Measure, Sampler, measure, ratio
from benchmarks.wire.blocks import Sent, reference, sent_blocks
from nnsight_engine.serialization import decode, decode_trace, encode, encode_trace

_RESULTS: Final = Path(__file__).parents[1] / "results"
_NUM_TENSORS: Final = 25
_TENSOR_BYTES: Final = 2 * 2**20
_TOTAL_MIB: Final = _NUM_TENSORS * _TENSOR_BYTES // 2**20
_TITLE: Final = "Sending traces and what they saved"
_METHOD: Final = """\
On one thread. Sides take turns in mirrored order; a figure is the median over {0} repetitions of what is made
of the sides' times in one. *ours* is `encode_trace` and `decode_trace`, block compiled, *cloudpickle*
writes and reads the compiled block as a function on the same variables, the model left out. *20 lines* has a
helper function, two variables and a vector of 576 numbers, *closure* three functions that share variables.
The same block comes again and again, as in a loop: what is found out of its source is kept.
Saves are {1} tensors of 2 MiB each; *copy* copies them once. At {2} ms it is 1 GB/s in each direction.
Made by `python -m benchmarks.wire --repeats {0}`."""


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="few repetitions, printed and not written")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the tables")
    args = parser.parse_args()
    repeats = 5 if args.quick else args.repeats
    console = Console()
    machine = announced_machine(console)
    torch.set_num_threads(1)
    cases = [case for sent in sent_blocks() for case in (_encoding(sent), _decoding(sent))]
    rows = [row for case in [*cases, _saves_out(), _saves_in()] for row in measure(case, repeats)]
    method = _METHOD.format(repeats, _NUM_TENSORS, f"{_target_ms():.0f}")
    report = Report(machine, "wire", _TITLE, method, (repeats,), rows)
    console.print(report.table())
    if not args.quick:
        console.print(f"Written to {report.write(args.output)}", soft_wrap=True)
    return 0


def _milliseconds(side: str, target: float) -> Measure:
    return Measure(f"{side}, ms", lambda sample: 1e3 * sample[side], target)


def _encoding(sent: Sent) -> Case:
    def make() -> Sampler:
        return CallsByTurns(
            {
                "ours": lambda: encode_trace([sent.block], reference=reference),
                "cloudpickle": lambda: cloudpickle.dumps(sent.function),
            }
        )

    measures = (_milliseconds("ours", 1.0), ratio("ours", "cloudpickle"))
    return Case("encode", sent.name, make, measures)


def _decoding(sent: Sent) -> Case:
    def make() -> Sampler:
        ours = encode_trace([sent.block], reference=reference)
        theirs = cloudpickle.dumps(sent.function)
        return CallsByTurns(
            {
                "ours": lambda: decode_trace(ours, resolve=lambda name: name),
                "cloudpickle": lambda: cloudpickle.loads(theirs),
            }
        )

    measures = (_milliseconds("ours", 1.0), ratio("ours", "cloudpickle"))
    return Case("decode", sent.name, make, measures)


def _target_ms() -> float:
    return _NUM_TENSORS * _TENSOR_BYTES / 1e9 * 1e3


def _saved() -> dict[str, torch.Tensor]:
    return {f"layer {number}": torch.randn(_TENSOR_BYTES // 4) for number in range(_NUM_TENSORS)}


def _saves_out() -> Case:
    def make() -> Sampler:
        saved = _saved()
        return CallsByTurns(
            {"ours": lambda: encode(saved), "copy": lambda: [one.clone() for one in saved.values()]}
        )

    return Case(
        "encode saves",
        f"{_TOTAL_MIB} MiB",
        make,
        (_milliseconds("ours", _target_ms()), ratio("ours", "copy")),
    )


def _saves_in() -> Case:
    def make() -> Sampler:
        saved = _saved()
        data = bytearray(encode(saved))  # what a client has received
        return CallsByTurns(
            {"ours": lambda: decode(data), "copy": lambda: [one.clone() for one in saved.values()]}
        )

    return Case(
        "decode saves",
        f"{_TOTAL_MIB} MiB",
        make,
        (_milliseconds("ours", _target_ms()), ratio("ours", "copy")),
    )


if __name__ == "__main__":
    sys.exit(main())
