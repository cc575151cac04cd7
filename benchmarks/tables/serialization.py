"""What sending a trace costs, beside cloudpickle, and its saved values, beside a copy, on one thread."""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from typing import Final

import cloudpickle  # noqa: TID251 - what is compared with
import torch

from benchmarks.case import Case, Measure, Plan, Sampler, ratio
from benchmarks.clients.sent_blocks import EncodedBlock, reference, sent_blocks
from benchmarks.turns import CallsByTurns, Side
from nnsight_engine.serialization import decode, decode_trace, encode, encode_trace

_NUM_TENSORS: Final = 25
_TENSOR_BYTES: Final = 2 * 2**20
_SAVES_TARGET_MS: Final = _NUM_TENSORS * _TENSOR_BYTES / 1e9 * 1e3
"""At 1 GB/s."""
_BLOCK_TARGET_MS: Final = 1.0
_METHOD: Final = f"""\
On one thread. *ours* is `encode_trace` and `decode_trace`, block compiled, *cloudpickle* writes and reads the
compiled block as a function on the same variables, the model left out. *20 lines* has a helper function, two
variables and a vector of 576 numbers, *closure* three functions that share variables. The same block comes
again and again, as in a loop: what is found out of its source is cached. Saves are {_NUM_TENSORS} tensors of
2 MiB each; *copy* copies them once. At {_SAVES_TARGET_MS:.0f} ms it is 1 GB/s in each direction."""


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Add none."""


def plan(_args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    torch.set_num_threads(1)
    cases = [case for sent in sent_blocks() for case in _block_cases(sent)]
    size = f"{_NUM_TENSORS * _TENSOR_BYTES // 2**20} MiB"
    cases += [
        _case("encode saves", size, partial(_saves, is_encoding=True), "copy", _SAVES_TARGET_MS),
        _case("decode saves", size, partial(_saves, is_encoding=False), "copy", _SAVES_TARGET_MS),
    ]
    return Plan("serialization", "Sending traces and their saved values", _METHOD, cases)


def _case(name: str, size: str, sides: partial[dict[str, Side]], baseline: str, target_ms: float) -> Case:
    def make() -> Sampler:
        return CallsByTurns(sides())

    milliseconds = Measure("ours, ms", lambda one: 1e3 * one["ours"], target_ms)
    return Case(name, size, make, (milliseconds, ratio("ours", baseline)))


def _block_cases(sent: EncodedBlock) -> list[Case]:
    ours = encode_trace([sent.block], reference=reference)
    theirs = cloudpickle.dumps(sent.function)
    encoding: dict[str, Side] = {
        "ours": lambda: encode_trace([sent.block], reference=reference),
        "cloudpickle": lambda: cloudpickle.dumps(sent.function),
    }
    decoding: dict[str, Side] = {
        "ours": lambda: decode_trace(ours, resolve=lambda name: name),
        "cloudpickle": lambda: cloudpickle.loads(theirs),
    }
    return [
        _case(name, sent.name, partial(dict, sides), "cloudpickle", _BLOCK_TARGET_MS)
        for name, sides in (("encode", encoding), ("decode", decoding))
    ]


def _saves(*, is_encoding: bool) -> dict[str, Side]:
    saved = {f"layer {number}": torch.randn(_TENSOR_BYTES // 4) for number in range(_NUM_TENSORS)}
    received = bytearray(encode(saved))
    return {
        "ours": (lambda: encode(saved)) if is_encoding else (lambda: decode(received)),
        "copy": lambda: [one.clone() for one in saved.values()],
    }
