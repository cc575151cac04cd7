"""Checks that run in a process of their own, whose name is a module's, and leave a report.

The process is given a folder and the families to check; it writes ``report.json`` there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

REPORT: Final = "report.json"
_PROJECT: Final = Path(__file__).resolve().parents[2]
_TIMEOUT_S: Final = 600
_OUTPUT_SHOWN: Final = 6000


def report_of(
    module: str, folder: Path, families: Sequence[str] = (), *, engine_in_process: bool = True
) -> Any:
    """Run the checks and return their report; raises AssertionError with the output when there is none."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if engine_in_process else "1",
        # A graph compiled by an earlier version of the taps must not be found.
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        # Two processes share the cores; left alone, both would bind to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), *families],
        cwd=_PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
        check=False,
    )
    output = done.stdout.decode("utf-8", "replace")[-_OUTPUT_SHOWN:]
    assert done.returncode == 0, f"{module} {' '.join(families)} exited with {done.returncode}:\n{output}"
    return json.loads((folder / REPORT).read_text())
