"""Checks that run in a process of their own, whose name is a module's, and leave a report.

The process is given a folder and the names of what to check; it writes ``report.json`` there. Several checks
that must not meet in one process share what takes longest, the imports: each runs in a fork (``in_forks``).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

REPORT: Final = "report.json"
_PROJECT: Final = Path(__file__).resolve().parents[2]
_TIMEOUT_S: Final = 600
_OUTPUT_SHOWN: Final = 6000


def report_of(
    module: str,
    folder: Path,
    names: Sequence[str] = (),
    *,
    engine_in_process: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run the checks and return their report; raises AssertionError with the output when there is none."""
    variables = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if engine_in_process else "1",
        "VLLM_CACHE_ROOT": str(own_cache(folder / "cache")),
        # Two processes share the cores; left alone, both would bind to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), *names],
        cwd=_PROJECT,
        env={**variables, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
        check=False,
    )
    output = done.stdout.decode("utf-8", "replace")[-_OUTPUT_SHOWN:]
    assert done.returncode == 0, f"{module} {' '.join(names)} exited with {done.returncode}:\n{output}"
    return json.loads((folder / REPORT).read_text())


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


def in_forks(check: Callable[[str], Any], folder: Path, names: Sequence[str]) -> None:
    """Run a check of each name in a fork of this process, in order, and write what they return, by name.

    The process has imported what they need, and run nothing of it. It ends where one of them fails.
    """
    context = multiprocessing.get_context("fork")
    reports = {}
    for name in names:
        said, saying = context.Pipe(duplex=False)
        process = context.Process(target=lambda name=name, saying=saying: saying.send(check(name)))
        process.start()
        saying.close()
        try:
            reports[name] = said.recv()
        except EOFError:
            process.join()
            sys.exit(f"the check of {name} ended with {process.exitcode}")
        process.join()
    (folder / REPORT).write_text(json.dumps(reports))
