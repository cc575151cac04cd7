"""Places that are full, refuse, fail for a while or are slow, and S3."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nnsight_engine.datasets import load
from nnsight_engine.datasets.manifest import (
    IncompleteDatasetError,
    SinkError,
    SinkFullError,
    SinkRefusedError,
    SinkTimeoutError,
)
from nnsight_engine.datasets.plan import ShardPlan
from nnsight_engine.datasets.storage import Retries
from nnsight_engine.datasets.writer import DatasetWriter
from tests.unit.datasets.making import exit_of, files, forked, manifest, prompts, rows_of, write

QUICK = Retries(attempts=4, first_pause_s=0.001, max_pause_s=0.002)


class FaultyFileSystem(MemoryFileSystem):
    """Fails uploads as told, and counts them."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[list[Exception]] = []
    forever: ClassVar[Exception | None] = None
    pause_s: ClassVar[float] = 0.0
    uploaded: ClassVar[list[str]] = []

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.pause_s)
        if self.forever is not None:
            raise self.forever
        if self.failures:
            raise self.failures.pop()
        self.uploaded.append(rpath)
        super().put_file(lpath, rpath, *args, **kwargs)


@pytest.fixture
def faulty() -> Iterator[type[FaultyFileSystem]]:
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    kind = FaultyFileSystem
    kind.store.clear()
    kind.failures, kind.forever, kind.pause_s, kind.uploaded = [], None, 0.0, []
    yield kind
    kind.store.clear()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"spool": tmp_path / "spool", "retries": QUICK}


def remote_files(url: str) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(url)
    paths = filesystem.find(root)
    return {path[len(root) :].lstrip("/"): filesystem.cat_file(path) for path in paths}


def test_a_url_has_the_same_files_as_a_folder(tmp_path: Path, options: dict[str, Any]) -> None:
    given = prompts(40)
    write(tmp_path / "local", given, manifest())
    assert write("memory://sets/one", given, manifest(), **options).failure is None
    assert remote_files("memory://sets/one") == files(tmp_path / "local")
    dataset = load("memory://sets/one")
    assert dataset.rows("layers.0.output")[:].equal(load(tmp_path / "local").rows("layers.0.output")[:])
    assert not list((tmp_path / "spool").rglob("*"))


def test_an_index_is_uploaded_last(faulty: type[FaultyFileSystem], options: dict[str, Any]) -> None:
    write("faulty://sets/one", prompts(10), manifest(), **options)
    names = [path.rpartition("/")[2] for path in faulty.uploaded]
    assert names[:3] == ["layers.0.output.safetensors", "layers.1.mlp.act.safetensors", "index.parquet"]


def test_failures_that_pass_are_retried(
    faulty: type[FaultyFileSystem], tmp_path: Path, options: dict[str, Any]
) -> None:
    given = prompts(40)
    faulty.failures = [ConnectionError("reset"), TimeoutError("slow"), OSError("503")]
    assert write("faulty://sets/one", given, manifest(), **options).failure is None
    write(tmp_path / "local", given, manifest())
    assert remote_files("faulty://sets/one") == files(tmp_path / "local")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "no space"), SinkFullError),
        (PermissionError("no"), SinkRefusedError),
        (ConnectionError("gone"), SinkError),
        (RuntimeError("a client's own"), SinkError),
    ],
)
def test_failures_that_stay_are_typed_and_resumed(
    faulty: type[FaultyFileSystem],
    tmp_path: Path,
    options: dict[str, Any],
    error: Exception,
    kind: type[Exception],
) -> None:
    given = prompts(40)
    faulty.forever = error
    failure = write("faulty://sets/one", given, manifest(), **options).failure
    assert type(failure) is kind
    assert failure is not None
    assert failure.__cause__ is error
    with pytest.raises(IncompleteDatasetError):
        load("faulty://sets/one")
    faulty.forever = None
    assert write("faulty://sets/one", given, manifest(), **options).failure is None
    write(tmp_path / "local", given, manifest())
    assert remote_files("faulty://sets/one") == files(tmp_path / "local")


def test_a_slow_place_makes_the_driver_wait(faulty: type[FaultyFileSystem], options: dict[str, Any]) -> None:
    faulty.pause_s = 0.01
    made = manifest()
    progress = write("faulty://sets/one", prompts(60), made, pending_limit_bytes=3000, **options)
    assert progress.failure is None
    assert progress.num_dropped == 0


def test_a_slow_place_drops_prompts_if_told_so(
    faulty: type[FaultyFileSystem], options: dict[str, Any]
) -> None:
    faulty.pause_s = 0.02
    given = prompts(100)
    options |= {"policy": "drop", "pending_limit_bytes": 4000}
    progress = write("faulty://sets/one", given, manifest(), **options)
    assert progress.failure is None
    dataset = load("faulty://sets/one")
    dropped = [prompt for shard in dataset.shards for prompt in shard.dropped]
    stored = {int(n) for shard in dataset.shards for n in dataset.index(shard.number)["prompt"]}
    assert 0 < len(dropped) == progress.num_dropped
    assert stored | set(dropped) == set(range(100))
    assert not stored & set(dropped)
    assert progress.num_prompts == 100


def test_a_place_that_hangs_is_a_timeout(faulty: type[FaultyFileSystem], options: dict[str, Any]) -> None:
    faulty.pause_s = 1.0
    given, made = prompts(3), manifest()
    writer = DatasetWriter("faulty://sets/one", made, **options)
    from_driver = write_into(writer, given, made)
    assert from_driver == 3
    assert isinstance(writer.close(timeout_s=0.1).failure, SinkTimeoutError)


def write_into(writer: DatasetWriter, given: Any, made: Any) -> int:
    writer.begin(ShardPlan(0, 0, len(given), "x"))
    for number, one in enumerate(given):
        writer.put(rows_of(number, np.asarray(one.token_ids, np.int32), made.rows))
    return len(given)


def test_a_full_disk(tmp_path: Path) -> None:
    given, made = prompts(200), manifest()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4500, resource.RLIM_INFINITY))
        failure = write(tmp_path, given, made).failure
        assert isinstance(failure, SinkFullError), failure

    assert exit_of(forked(limited)) == 0
    assert write(tmp_path, given, made).failure is None
    assert load(tmp_path).manifest.num_prompts == 200


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="ascii")
    with pytest.raises(SinkError):
        DatasetWriter(tmp_path / "file" / "set", manifest())
    with pytest.raises(SinkRefusedError, match="nothere"):
        DatasetWriter("nothere://bucket/set", manifest())


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    # In a process of its own: proxies of Flask, once imported, break vLLM's search through all modules.
    script = (
        "import time; from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer('127.0.0.1', 0); server.start()\n"
        "print(server.get_host_and_port()[1], flush=True); time.sleep(3600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = next(int(line) for line in server.stdout if line.strip().isdecimal())
    before = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    os.environ.update(dict.fromkeys(before, "testing"))
    fsspec.config.conf["s3"] = {"client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
    fsspec.filesystem("s3").mkdir("bucket")
    yield
    del fsspec.config.conf["s3"]
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    server.kill()
    server.wait()


@pytest.mark.usefixtures("s3")
def test_s3(tmp_path: Path, options: dict[str, Any]) -> None:
    given = prompts(40)
    write(tmp_path / "local", given, manifest())
    assert write("s3://bucket/sets/one", given, manifest(), **options).failure is None
    assert remote_files("s3://bucket/sets/one") == files(tmp_path / "local")
    filesystem = fsspec.filesystem("s3")
    filesystem.rm("bucket/sets/one/shards/00001/index.parquet")
    filesystem.rm("bucket/sets/one/manifest.json")
    assert write("s3://bucket/sets/one", given, manifest(), **options).failure is None
    assert remote_files("s3://bucket/sets/one") == files(tmp_path / "local")
    assert len(load("s3://bucket/sets/one").rows("layers.1.mlp.act")) == load(tmp_path / "local").num_rows


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_does_not_exist(options: dict[str, Any]) -> None:
    with pytest.raises(SinkRefusedError, match="s3://nobucket/one"):
        DatasetWriter("s3://nobucket/one", manifest(), **options)
