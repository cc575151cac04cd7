"""The pages that start engines of their own, apart from those beside whose servers memory would be short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from nnsight_engine import bundled_model_path
from tests.guide.pages import PROJECT, WITH_ENGINES

_LIMIT_S: Final = 1200
"""Each engine compiles its model, which takes minutes without AVX-512."""


@pytest.mark.e2e
@pytest.mark.heavy
@pytest.mark.timeout(_LIMIT_S + 60)
@pytest.mark.parametrize("path", WITH_ENGINES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_a_page_with_engines_of_its_own_runs(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.guide.pages", str(path), str(bundled_model_path()), str(tmp_path)],
        cwd=PROJECT,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
