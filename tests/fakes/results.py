"""The fake engine's capabilities and results: right in shape, made up in value."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from api_schemas.interventions import Intervention, Operation
from api_schemas.operation_names import condition_tests, points_of_names
from api_schemas.operations import (
    Capture,
    Detect,
    Features,
    Flag,
    LogitLens,
    PointOperation,
    Probe,
    Stop,
    Trace,
)
from api_schemas.server import Capabilities
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedLens,
    CollectedMarks,
    CollectedProbe,
    CollectedResult,
    CollectedResults,
    CollectedScores,
    CollectedSites,
    CollectedTrace,
    LensRows,
    TensorResult,
)

MODEL: Final = "fake-model"
FINGERPRINT: Final = "of-the-fake-model"
WIDTH: Final = 8
_NUM_LAYERS: Final = 4
_VOCAB_SIZE: Final = 1000
_READS: Final = (Capture, Probe, LogitLens, Detect, Features, Stop, Flag)


def collected(
    interventions: tuple[Intervention, ...], span: range, *, is_final: bool, pull: Sequence[float] = ()
) -> CollectedResults:
    """Return results at the positions of ``span`` for every read, and report all operations as applied there.

    Args:
        interventions: The request's.
        span: Positions of tokens.
        is_final: Whether these are the choice's last results.
        pull: Added to the first number of every captured row, by layer.
    """
    positions = list(span)
    traces = [op for op in interventions if isinstance(op, Trace)]
    if traces:
        saves = {"seen": positions, "hidden": _tensor(positions, is_reduced=False)}
        result = CollectedTrace(traces[0].name or "trace_0", saves, {}, "")
        return CollectedResults([result], final=is_final, is_code=True, tier="tap")
    operations = [op for op in interventions if not isinstance(op, Trace)]
    return _collected(operations, positions, pull, is_final=is_final)


def _collected(
    interventions: Sequence[Operation], positions: list[int], pull: Sequence[float], *, is_final: bool
) -> CollectedResults:
    results = [
        _result(op, _name(op, index), positions, pull)
        for index, op in enumerate(interventions)
        if isinstance(op, _READS)
    ]
    reached = list(range(positions[-1] + 1)) if positions else []
    applied = [_applied(op, reached) for op in interventions] if is_final else []
    writes = any(not isinstance(op, _READS) for op in interventions)
    return CollectedResults(
        results, final=is_final, applied=applied, fingerprint="fa" * 32 if writes else "", tier="tap"
    )


def _applied(op: Operation, positions: list[int]) -> CollectedSites:
    tests = condition_tests(op)
    if not tests:
        return CollectedSites(op.op, _points(op), positions)
    return CollectedSites(op.op, _points(op), _held(positions), ["same"] * len(tests))


def _held(positions: list[int]) -> list[int]:
    """Return where made-up conditions hold: at every third position."""
    return [position for position in positions if position % 3 == 2]


def _name(op: Operation, index: int) -> str:
    return op.name or f"{op.op}_{index}"


def _points(op: Operation) -> list[str]:
    if isinstance(op, LogitLens):
        return [f"layers.{layer}.output" for layer in _layers(op)]
    if not isinstance(op, PointOperation):
        return points_of_names(op) or ["layers.0.output"]
    return [op.at] if isinstance(op.at, str) else list(op.at)


def _layers(op: LogitLens) -> list[int]:
    return list(range(_NUM_LAYERS)) if isinstance(op.layers, str) else list(op.layers)


def _result(
    op: Capture | Probe | LogitLens | Detect | Features | Stop | Flag,
    name: str,
    positions: list[int],
    pull: Sequence[float],
) -> CollectedResult:
    if isinstance(op, Capture):
        is_reduced = op.reduce != "none"
        points = {point: _tensor(positions, _at(point, pull), is_reduced=is_reduced) for point in _points(op)}
        return CollectedCapture(name, positions, op.reduce, points)
    if isinstance(op, Probe):
        return CollectedProbe(name, positions, {point: _tenths(positions) for point in _points(op)})
    if isinstance(op, Detect):
        return CollectedScores(name, positions, _tenths(positions))
    if isinstance(op, Features):
        ids = [one for one in op.features or range(op.top_k or 10) if isinstance(one, int)]
        ranks = np.arange(1, len(ids) + 1)
        activations = ((np.array(positions)[:, None] + 1) / ranks).astype(np.float32)
        features = np.broadcast_to(np.array(ids, np.int32), activations.shape)
        return CollectedFeatures(name, positions, features, activations, drops_zeros=op.top_k is not None)
    if isinstance(op, Stop | Flag):
        return CollectedMarks(name, op.op, _held(positions) if isinstance(op, Flag) else [])
    rows = _lens_rows(positions, op.top_k, len(op.targets or ()))
    return CollectedLens(name, positions, dict.fromkeys(_layers(op), rows))


def _tenths(positions: list[int]) -> npt.NDArray[np.float32]:
    return np.array([position / 10 for position in positions], np.float32)


def _at(point: str, pull: Sequence[float]) -> float:
    """Return the pull at a point's layer."""
    layer = next((int(part) for part in point.split(".") if part.isdecimal()), len(pull))
    return pull[layer] if layer < len(pull) else 0.0


def _tensor(positions: list[int], pull: float = 0.0, *, is_reduced: bool) -> TensorResult:
    rows = positions[-1:] if is_reduced else positions
    shape = (WIDTH,) if is_reduced else (len(rows), WIDTH)
    numbers = [position + (pull if column == 0 else 0.0) for position in rows for column in range(WIDTH)]
    return TensorResult("float32", shape, struct.pack(f"<{len(numbers)}f", *numbers))


def _lens_rows(positions: list[int], top_k: int, num_targets: int) -> LensRows:
    def ids(count: int) -> npt.NDArray[np.int32]:
        return np.add.outer(np.array(positions, np.int32), np.arange(count, dtype=np.int32))

    def logprobs(count: int) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = np.empty((len(positions), count), np.float32)
        rows[:] = np.arange(1, count + 1) / -2
        return rows

    ranks = np.tile(np.arange(1, num_targets + 1, dtype=np.int32), (len(positions), 1))
    targets = tuple(range(num_targets))
    return LensRows(ids(top_k), logprobs(top_k), targets, logprobs(num_targets), ranks)


CAPABILITIES: Final = Capabilities.model_validate(
    {
        "model": MODEL,
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "points": [
            {
                "name": f"layers.*.{leaf}",
                "shape": [WIDTH],
                "width": WIDTH,
                "tier": "tap",
                "operations": ["steer", "ablate", "patch", "capture", "probe", *more],
            }
            for leaf, more in (("output", ["logit_lens"]), ("input", []))
        ],
        "operations": ["steer", "ablate", "patch", "capture", "probe", "logit_lens"],
        "limits": {
            "max_operations": 64,
            "max_tensor_bytes": 1 << 20,
            "max_capture_bytes": 1 << 20,
            "max_work": 64.0,
            "max_num_batched_tokens": 2048,
        },
        "sizes": {
            "num_layers": _NUM_LAYERS,
            "hidden_size": WIDTH,
            "vocab_size": _VOCAB_SIZE,
            "max_model_len": 2048,
        },
    }
)
