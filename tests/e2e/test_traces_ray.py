"""Blocks in engines whose workers Ray runs: in a cluster started for the engine, and in one that is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import ray
from ray._private import services

from tests.e2e.sandboxed import in_sandboxes
from tests.e2e.traced_scenarios import Values, assert_same, writes_seen_in_later_layers
from tests.e2e.traces import traced_engine
from tests.families.checkpoints import write_checkpoint
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_PATIENCE_S: Final = 60
_PROJECT: Final = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Let two workers share the cores; no cluster is meant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        patch.delitem(os.environ, "RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Values:
    with traced_engine(checkpoint, max_model_len=64) as model:
        return writes_seen_in_later_layers(model)


def check(checkpoint: Path, expected: Values, option: str) -> None:
    """Compare trusted and sandboxed blocks over two workers of Ray's with one worker of our own.

    ``option`` says what the two are for.
    """
    options: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 32}
    options |= {"distributed_executor_backend": "ray", option: 2}
    with traced_engine(checkpoint, **options) as model:
        assert_same(writes_seen_in_later_layers(model), expected)
        with in_sandboxes(model):
            sandboxed = writes_seen_in_later_layers(model)
        assert_same(sandboxed, expected)


def test_a_cluster_is_started_and_ended_with_the_engine(checkpoint: Path, expected: Values) -> None:
    check(checkpoint, expected, "tensor_parallel_size")
    assert not ray.is_initialized()
    assert not services.find_gcs_addresses()


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Run a cluster as its user would, with room for two workers; yields its address."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short name, for sockets; not where others look for a cluster
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        f"start --head --block --node-ip-address=127.0.0.1 --port={port} --num-cpus=2 --num-gpus=2 "
        f"--include-dashboard=false --disable-usage-stats --object-store-memory=100000000 --temp-dir={folder}"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *options.split()],
        env={**os.environ, "PYTHONPATH": str(_PROJECT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _wait_for(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_PATIENCE_S)
            shutil.rmtree(folder, ignore_errors=True)


def _wait_for(port: int) -> None:
    def is_open() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_for(is_open, _PATIENCE_S, "the cluster's start")


def test_a_cluster_that_is_there_is_joined_and_left(
    checkpoint: Path, expected: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        check(checkpoint, expected, "pipeline_parallel_size")
        ray.init(address=address)
        assert ray.available_resources()["GPU"] == 2
        ray.shutdown()
