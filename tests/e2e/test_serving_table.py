"""The serving table on synchronous and asynchronous engines: its cases end, and are measured.

Its ratios say nothing here: the model is tiny.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.check_process import own_cache
from tests.e2e.engine_kinds import EngineKind, environment
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_CASES: Final = ("control", "idle", "one request", "own condition", "last token", "one steer")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_table_is_measured(kind: str, tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path / "model", max_position_embeddings=1024)
    command = [sys.executable, "-m", "benchmarks", "serving", "--repeats", "1", "--processes", "1"]
    command += ["--mode", "eager", "--model", str(model), "--batches", "2", "--prompts", "16", "--steps", "8"]
    command += ["--output", str(tmp_path), "--only", *_CASES]
    cache = {"VLLM_CACHE_ROOT": str(own_cache(tmp_path / "cache")), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ran = subprocess.run(
        command,
        env={**os.environ, **environment(EngineKind.named(kind)), **cache},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    (file,) = tmp_path.glob("*-serving-eager.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["case"].split(":")[0] for row in rows} > {"idle", "first token"}
    for row in rows:
        assert row["value"] is not None, row
        assert row["value"] > 0, row
        assert not row["note"], row
