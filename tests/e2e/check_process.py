"""Checks that run in processes of their own and leave a report.

A module of checks has a function ``check`` that takes a name and a folder, and returns what JSON can say.
Checks that must not meet in one process share what takes longest, the imports: each runs in a fork of the
process that has imported the module, in order.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.memory import frozen_heap

_REPORT: Final = "report.json"
_PROJECT: Final = Path(__file__).resolve().parents[2]
_TIMEOUT_S: Final = 600
_OUTPUT_SHOWN: Final = 6000


def report_of(
    module: str,
    folder: Path,
    names: Sequence[str],
    *,
    engine_in_process: bool = True,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, Any]:
    """Run the checks of a module; return by name what they return.

    Raises:
        AssertionError: One of them ended without a report; with the output.
    """
    variables = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if engine_in_process else "1",
        "VLLM_CACHE_ROOT": str(own_cache(folder / "cache")),
        # Two processes share the cores; left alone, both would bind to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__, module, str(folder), *names],
        cwd=_PROJECT,
        env={**variables, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )
    output = done.stdout.decode("utf-8", "replace")[-_OUTPUT_SHOWN:]
    assert done.returncode == 0, f"{module} {' '.join(names)} exited with {done.returncode}:\n{output}"
    found: dict[str, Any] = json.loads((folder / _REPORT).read_text())
    return found


def own_cache(cache: Path) -> Path:
    """Make a cache for vLLM in which a graph compiled by an earlier version of the taps cannot be found.

    Descriptions of vLLM's model classes are shared: each takes a process of some seconds to make.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    described = Path(os.environ.get("VLLM_CACHE_ROOT") or caches / "vllm") / "modelinfos"
    described.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / described.name).exists():
        (cache / described.name).symlink_to(described)
    return cache


def main(module: str, folder: Path, names: Sequence[str]) -> None:
    """Run each check in a fork of this process, which has run nothing of it; ends where one of them fails."""
    check = importlib.import_module(module).check
    context = multiprocessing.get_context("fork")
    reports = {}
    with frozen_heap():
        for name in names:
            said, saying = context.Pipe(duplex=False)
            process = context.Process(
                target=lambda name=name, saying=saying: saying.send(check(name, folder))
            )
            process.start()
            saying.close()
            try:
                reports[name] = said.recv()
            except EOFError:
                process.join()
                sys.exit(f"the check of {name} ended with {process.exitcode}")
            process.join()
    (folder / _REPORT).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
