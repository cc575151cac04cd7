"""Files of a dataset: their values, their order, and that they are the same after any interruption."""

from __future__ import annotations

import functools
import random
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nnsight_engine.datasets import load
from nnsight_engine.datasets.manifest import DatasetBusyError, ManifestMismatchError, PlanSettings, Point
from nnsight_engine.datasets.plan import ShardPlan
from nnsight_engine.datasets.shards import PromptRows, crc32_combine, quantized
from nnsight_engine.datasets.writer import DatasetWriter, WriterError
from tests.unit.datasets.making import (
    POINTS,
    each_position,
    files,
    killed_after,
    manifest,
    prompts,
    rows_of,
    value,
    write,
)


def test_rows_and_index_are_those_that_were_put(tmp_path: Path) -> None:
    given = prompts(30)
    progress = write(tmp_path, given, manifest(scores=["norm"]))
    assert progress.failure is None
    expected = list(each_position(given))
    dataset = load(tmp_path)
    assert len(dataset.shards) > 2
    assert dataset.num_rows == progress.num_rows == len(expected)
    assert dataset.manifest.num_prompts == progress.num_prompts == 30
    columns = [dataset.index(shard.number) for shard in dataset.shards]
    found = [
        np.concatenate([one[name] for one in columns]).tolist() for name in ("prompt", "position", "token")
    ]
    assert list(zip(*found, strict=True)) == expected
    assert np.concatenate([one["norm"] for one in columns]).tolist() == found[1]
    for point in POINTS:
        rows = torch.cat([value(n, np.array([p], np.int32), point.width) for n, p, _ in expected])
        stored = [
            load_file(tmp_path / f"shards/{shard.number:05d}/{point.name}.safetensors")["rows"]
            for shard in dataset.shards
        ]
        assert torch.equal(torch.cat(stored), rows)
        assert torch.equal(dataset.rows(point.name)[:], rows)


def test_checksums_are_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, prompts(20), manifest(dtype="int8"))
    for shard in load(tmp_path).shards:
        for name, file in shard.files.items():
            data = (tmp_path / f"shards/{shard.number:05d}/{name}").read_bytes()
            assert (len(data), f"{zlib.crc32(data):08x}") == (file.bytes, file.crc32)


@pytest.mark.parametrize("first", [b"", b"a", b"header" * 700])
@pytest.mark.parametrize("second", [b"", b"x", bytes(range(256)) * 99])
def test_checksums_are_combined(first: bytes, second: bytes) -> None:
    combined = crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


def test_the_header_is_reserved(tmp_path: Path) -> None:
    write(tmp_path, prompts(3), manifest())
    data = (tmp_path / "shards/00000/layers.0.output.safetensors").read_bytes()
    assert struct.unpack("<Q", data[:8]) == (4088,)
    assert data[8:4096].rstrip(b" ").endswith(b"}}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(tmp_path: Path, dtype: Any, source: torch.dtype) -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(source)
    made = manifest(points=[Point("logits", 3)], dtype=dtype)
    with DatasetWriter(tmp_path, made) as writer:
        writer.begin(ShardPlan(0, 0, 1, "x"))
        writer.put(
            PromptRows(0, np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32), {"logits": rows})
        )
    assert writer.progress().failure is None
    stored = load_file(tmp_path / "shards/00000/logits.safetensors")
    read = load(tmp_path).rows("logits")[:]
    if dtype == "int8":
        scales = rows.float().abs().amax(1) / 127
        assert torch.equal(stored["scales"], scales)
        assert torch.equal(stored["rows"], torch.round(rows.float() / scales[:, None]).to(torch.int8))
        assert bool(((read - rows.float()).abs() <= scales[:, None] * 0.5000001).all())
    else:
        assert torch.equal(stored["rows"], rows.to(getattr(torch, dtype)))
        assert torch.equal(read, stored["rows"])


def test_int8_of_zeros_and_of_what_is_not_finite() -> None:
    rows = torch.tensor([[0, 0], [torch.inf, 1], [torch.nan, 1], [1e-45, 0], [3e38, -3e38]])
    stored, scales = quantized(rows)
    assert stored[0].tolist() == [0, 0]
    assert scales[0] == 0
    assert not scales[1:3].isfinite().any()
    assert stored[4].tolist() == [127, -127]


def test_prompts_may_come_in_any_order_and_twice(tmp_path: Path) -> None:
    given = prompts(60)
    write(tmp_path / "a", given, manifest())

    def shuffled(rows: list[PromptRows]) -> list[PromptRows]:
        twice = rows + random.Random(len(rows)).sample(rows, len(rows) // 2)
        random.Random(0).shuffle(twice)
        return twice

    progress = write(tmp_path / "b", given, manifest(), order=shuffled)
    assert progress.failure is None
    assert progress.pending_bytes == 0
    assert progress.num_prompts == 60
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_shards_may_overlap_in_time(tmp_path: Path) -> None:
    given, made = prompts(8, longest=9), manifest()
    rows = [
        rows_of(number, np.asarray(one.token_ids, np.int32), made.rows) for number, one in enumerate(given)
    ]
    with DatasetWriter(tmp_path, made) as writer:
        writer.begin(ShardPlan(0, 0, 4, "a"))
        writer.begin(ShardPlan(1, 4, 4, "b"))
        for one in reversed(rows):
            writer.put(one)
    assert writer.progress().failure is None
    assert [shard.first_prompt for shard in load(tmp_path).shards] == [0, 4]
    assert load(tmp_path).index(1)["prompt"].min() == 4


@pytest.mark.parametrize("reduction", ["last", "mean", "every:3", "random:2"])
def test_reductions(tmp_path: Path, reduction: str) -> None:
    given = prompts(20)
    write(tmp_path, given, manifest(reduction=reduction, where={"range": [1, None]}))
    dataset = load(tmp_path)
    index = dataset.index(0)
    if reduction == "mean":
        assert set(index["position"].tolist()) == {-1}
        number = int(index["prompt"][0])
        positions = np.arange(1, len(given[number].token_ids or ()), dtype=np.int32)
        assert torch.equal(dataset.rows("layers.0.output")[0], value(number, positions, 8).mean(0))
    else:
        row = dataset.rows("layers.0.output")[0]
        assert torch.equal(row, value(int(index["prompt"][0]), index["position"][:1], 8)[0])


def test_a_dataset_without_rows(tmp_path: Path) -> None:
    assert write(tmp_path / "a", [], manifest()).failure is None
    assert len(load(tmp_path / "a").rows("layers.0.output")) == 0
    assert write(tmp_path / "b", prompts(9), manifest(where={"tokens": [99]})).failure is None
    assert load(tmp_path / "b").rows("layers.0.output")[:].shape == (0, 8)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    write(tmp_path, prompts(5), manifest())
    with pytest.raises(ManifestMismatchError, match=r"rows\.dtype"):
        DatasetWriter(tmp_path, manifest(dtype="int8"))
    with pytest.raises(ManifestMismatchError, match=r"plan\.pack_tokens"):
        DatasetWriter(tmp_path, manifest(PlanSettings(pack_tokens=3)))


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, manifest()), pytest.raises(DatasetBusyError):
        DatasetWriter(tmp_path, manifest())


def test_what_is_not_in_the_plan_is_a_failure(tmp_path: Path) -> None:
    made = manifest()
    with DatasetWriter(tmp_path, made) as writer:
        writer.begin(ShardPlan(0, 0, 2, "x"))
        writer.put(rows_of(7, np.arange(3, dtype=np.int32), made.rows))
    assert isinstance(writer.progress().failure, WriterError)
    with DatasetWriter(tmp_path, made) as writer:
        writer.begin(ShardPlan(0, 0, 2, "x"))
        writer.put(PromptRows(0, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), {}))
    assert "layers.0.output" in str(writer.progress().failure)


def test_closing_early_leaves_it_incomplete(tmp_path: Path) -> None:
    made = manifest()
    with DatasetWriter(tmp_path, made) as writer:
        writer.begin(ShardPlan(0, 0, 2, "x"))
        writer.put(rows_of(0, np.arange(3, dtype=np.int32), made.rows))
    assert isinstance(writer.progress().failure, WriterError)
    writer = DatasetWriter(tmp_path, made)
    writer.begin(ShardPlan(0, 0, 2, "x"))
    assert writer.close(complete=False).failure is None
    assert not writer.is_complete


def test_a_killed_writer_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    given, made = prompts(120), manifest(PlanSettings(pack_tokens=40, pack_prompts=4, shard_tokens=200))
    start = time.perf_counter()
    write(tmp_path / "whole", given, made, pause_s=0.0005)
    duration = time.perf_counter() - start
    whole = files(tmp_path / "whole")
    moments, num_killed, attempt = random.Random(3), 0, 0
    while num_killed < 20:
        attempt += 1
        folder = tmp_path / f"killed-{attempt}"
        for _ in range(2):
            num_killed += killed_after(
                moments.uniform(0.0, duration), functools.partial(write, folder, given, made, pause_s=0.0005)
            )
            assert attempt < 60
        complete = [one for one in files(folder) if one.endswith("index.parquet")] if folder.exists() else []
        assert all(files(folder)[one] == whole[one] for one in complete)
        assert write(folder, given, made).failure is None
        assert files(folder) == whole


def test_memory_is_flat(tmp_path: Path) -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * 4096

    num_prompts, rows_each = 20_000, 50
    made = manifest(PlanSettings(shard_tokens=100_000))
    positions = np.arange(rows_each, dtype=np.int32)
    values = {point.name: torch.ones(rows_each, point.width) for point in POINTS}
    sizes = []
    with DatasetWriter(tmp_path, made, pending_limit_bytes=2**20) as writer:
        for shard in range(10):
            writer.begin(ShardPlan(shard, shard * 2000, 2000, "x"))
            for prompt in range(shard * 2000, (shard + 1) * 2000):
                writer.wait_for_room()
                assert writer.pending_bytes < 2**20
                writer.put(PromptRows(prompt, positions, positions, values))
            sizes.append(resident())
    assert writer.progress().num_rows == num_prompts * rows_each
    assert max(sizes[5:]) - max(sizes[:5]) < 8 * 2**20
