"""Sending traces and their saved values, compared with cloudpickle and with a copy, on one thread.

*ours* is `encode_trace` and `decode_trace`, block compiled, *cloudpickle* writes and reads the compiled
block as a function on the same variables, the model left out. *20 lines* has a helper function, two
variables and a vector of 576 numbers, *closure* three functions that share variables. The same block comes
again and again, as in a loop: facts about its source are cached. Saves are 25 tensors of 2 MiB each; *copy*
copies them once. At 52 ms it is 1 GB/s in each direction.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import cloudpickle  # noqa: TID251 - what is compared with
import torch

from benchmarks.case import BenchmarkCase, Plan, ratio, total
from benchmarks.turns import CallsByTurns, Side
from nnsight_engine.serialization import SentBlock, decode, decode_trace, encode, encode_trace
from nnsight_engine.tracing.tracer import Info, Tracer

_WIDTH: Final = 576
_SCALE: Final = 1.5
_NUM_TENSORS: Final = 25
_TENSOR_BYTES: Final = 2 * 2**20
_SAVES_TARGET_MS: Final = _NUM_TENSORS * _TENSOR_BYTES / 1e9 * 1e3
"""At 1 GB/s."""
_BLOCK_TARGET_MS: Final = 1.0


def plan(_args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    torch.set_num_threads(1)
    blocks = {"one line": _one_line(), "20 lines": _twenty_lines(), "closure": _closure()}
    cases = [case for name, block in blocks.items() for case in _block_cases(name, block)]
    saved = {f"layer {number}": torch.randn(_TENSOR_BYTES // 4) for number in range(_NUM_TENSORS)}
    received, size = bytearray(encode(saved)), f"{_NUM_TENSORS * _TENSOR_BYTES // 2**20} MiB"

    def copy() -> list[torch.Tensor]:
        return [one.clone() for one in saved.values()]

    sides: dict[str, Side] = {"encode saves": lambda: encode(saved), "decode saves": lambda: decode(received)}
    for name, ours in sides.items():
        cases.append(_case(name, size, {"ours": ours, "copy": copy}, "copy", _SAVES_TARGET_MS))
    return Plan(cases)


def _case(name: str, size: str, sides: dict[str, Side], baseline: str, target_ms: float) -> BenchmarkCase:
    milliseconds = total("ours, ms", {"ours": 1}, 1e3, target_ms)
    make = partial(CallsByTurns, sides)
    return BenchmarkCase(name, size, make, (milliseconds, ratio("ours", baseline)))


def _block_cases(size: str, block: SentBlock) -> list[BenchmarkCase]:
    function = Tracer().compile_on(block.info)
    sent, pickled = encode_trace([block], reference=_reference), cloudpickle.dumps(function)
    sides: dict[str, dict[str, Side]] = {
        "encode": {
            "ours": lambda: encode_trace([block], reference=_reference),
            "cloudpickle": lambda: cloudpickle.dumps(function),
        },
        "decode": {
            "ours": lambda: decode_trace(sent, resolve=lambda name: name),
            "cloudpickle": lambda: cloudpickle.loads(pickled),
        },
    }
    return [_case(name, size, one, "cloudpickle", _BLOCK_TARGET_MS) for name, one in sides.items()]


class _RecordingTracer(Tracer):
    """Keeps its block and does not run it."""

    block: SentBlock

    def execute(self, function: Callable[[], Any]) -> None:
        del function
        own = dict(self.info.variables)
        self.block = SentBlock(Info(self.info.block, own, None, self.info.globals_), own)


class _ModuleStandIn:
    """Replaces a module of the model: is sent as a reference, and accepts any access."""

    def __getattr__(self, _name: str) -> Any:
        return self

    def __getitem__(self, _key: Any) -> Any:
        return self

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Accept it."""


def _reference(value: Any) -> tuple[str, ...] | None:
    """Name the model and the tracer, which are sent as references."""
    return ("known", "1") if isinstance(value, _ModuleStandIn | Tracer) else None


def _one_line() -> SentBlock:
    model = _ModuleStandIn()
    sender = _RecordingTracer()
    with sender:
        hidden = model.layers[5].output.save()  # noqa: F841 - it is the block that counts
    return sender.block


def _scaled(value: torch.Tensor, *, by: float = _SCALE) -> torch.Tensor:
    """Return the value scaled to a length."""
    length = value.norm(dim=-1, keepdim=True)
    scaled: torch.Tensor = value * by / length
    return scaled


def _twenty_lines() -> SentBlock:
    model, strength, tokens = _ModuleStandIn(), 4.0, [1, 2, 3]
    direction = torch.randn(_WIDTH)
    sender = _RecordingTracer()
    with sender as tracer:
        kept: list[Any] = []
        norms: list[float] = []
        for step in tracer.iter[:]:
            hidden = model.layers[10].output
            before = hidden.norm(dim=-1)
            hidden[:] = hidden + _scaled(direction, by=strength)
            after = model.layers[10].output.norm(dim=-1)
            if step in tokens:
                kept.append((step, before, after))
            top = model.logits.output.topk(5)
            for rank, token in enumerate(top.indices[0].tolist()):
                if token in tokens:
                    kept.append((step, rank, token))
            with contextlib.suppress(IndexError):
                norms.append(float(after[-1]))
            ratios = [second / first for first, second in itertools.pairwise(norms)]
            if ratios and max(ratios) > _SCALE:
                tracer.stop()
        answer = tracer.result.save()  # noqa: F841 - as above
    return sender.block


def _closure() -> SentBlock:
    model = _ModuleStandIn()
    centre = torch.zeros(_WIDTH)
    count = 0

    def centred(value: torch.Tensor) -> torch.Tensor:
        return value - centre

    def measured(value: torch.Tensor) -> float:
        nonlocal count
        count += 1
        return float(centred(value).norm())

    def among(values: list[torch.Tensor]) -> float:
        return max(measured(value) for value in values)

    sender = _RecordingTracer()
    with sender:
        largest = among([model.layers[layer].output for layer in range(3)])  # noqa: F841 - as above
        seen = count  # noqa: F841 - as above
    return sender.block
