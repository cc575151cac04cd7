"""Writing a dataset of activations, compared with `dd conv=fsync` on the same disk.

Both write the same bytes by turns into new files and bring them to the disk: *writer* is a `DatasetWriter`
with the rows of prompts of 256 tokens, at 4 points of width 2048, in four shards; *dd* writes zeros in
blocks of 1 MiB. Rows lie in memory, in the dtype of the model, and the writer converts them. Sides are
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.case import BenchmarkCase, Plan, Sample, Sampler, ratio
from benchmarks.turns import by_turns
from nnsight_engine.datasets.manifest import (
    Dtype,
    EngineIdentity,
    Manifest,
    ModelIdentity,
    Point,
    RowSettings,
    SourceIdentity,
)
from nnsight_engine.datasets.plan import ShardPlan
from nnsight_engine.datasets.shards import PromptRows
from nnsight_engine.datasets.writer import DatasetWriter

_TARGET: Final = 1.25
"""At least 80 % of dd's rate."""
_TOKENS: Final = 256
_WIDTH: Final = 2048
_POINTS: Final = 4
_SHARDS: Final = 4
_SIZES: Final[dict[Dtype, int]] = {"float32": 4, "bfloat16": 2, "int8": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the disk and the bytes."""
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; by default the one of temporary files"
    )
    parser.add_argument("--mib", type=int, default=2048, help="bytes of one side, in MiB")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Return the cases."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
    measures = (ratio("writer", "dd", _TARGET),)
    cases = [
        BenchmarkCase(
            f"{source} to {dtype}",
            f"{args.mib} MiB",
            partial(_sampler, folder, args.mib * 2**20, dtype, getattr(torch, source)),
            measures,
            unit="s",
        )
        for source, dtype in _CASES
    ]
    return Plan(cases)


_CASES: Final[tuple[tuple[str, Dtype], ...]] = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "int8"),
)


def _sampler(folder: Path, num_bytes: int, dtype: Dtype, source: torch.dtype) -> Sampler:
    num_prompts = num_bytes // (_SIZES[dtype] * _WIDTH * _POINTS * _TOKENS)
    values = torch.randn(_TOKENS, _WIDTH).to(source)
    sides = {
        "writer": partial(_write, folder / "set", num_prompts, dtype, values),
        "dd": partial(_dd, folder / "zeros", num_bytes),
    }
    return by_turns(sides)


def _write(folder: Path, num_prompts: int, dtype: Dtype, values: torch.Tensor) -> Sample:
    points = [Point(f"layers.{number}.output", _WIDTH) for number in range(_POINTS)]
    manifest = Manifest(
        model=ModelIdentity("none", ""),
        engine=EngineIdentity("none"),
        tokenizer="none",
        source=SourceIdentity("iterable"),
        rows=RowSettings(points=points, dtype=dtype),
    )
    positions = np.arange(_TOKENS, dtype=np.int32)
    rows = {point.name: values for point in points}
    begin = time.perf_counter()
    in_shard = -(-num_prompts // _SHARDS)
    with DatasetWriter(folder, manifest, pending_limit_bytes=2**28) as writer:
        for number, first in enumerate(range(0, num_prompts, in_shard)):
            count = min(in_shard, num_prompts - first)
            writer.begin(ShardPlan(number, first, count, ""))
            for prompt in range(first, first + count):
                writer.wait_for_room()
                writer.put(PromptRows(prompt, positions, positions, rows))
    seconds = time.perf_counter() - begin
    if writer.progress().failure is not None or writer.progress().num_prompts != num_prompts:
        raise RuntimeError("the writer did not write everything") from writer.progress().failure
    shutil.rmtree(folder)
    return {"": seconds}


def _dd(path: Path, num_bytes: int) -> Sample:
    begin = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={num_bytes // 2**20}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - begin
    path.unlink()
    return {"": seconds}
