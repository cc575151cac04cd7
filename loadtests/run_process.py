"""Runs each load test in a process of its own, because locust patches its process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.machine import Machine
from loadtests.run_spec import RunSpec
from loadtests.summary import Summary, read

SUMMARY_FILE: Final = "summary.json"


class RunError(Exception):
    """The process ended without a result; its error is on the terminal."""


def run_in_process(spec: RunSpec, folder: Path, machine: Machine) -> Summary:
    """Execute a run in a child process and return its summary; locust's report is in the folder.

    Raises:
        RunError: There is no result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary_file = folder / SUMMARY_FILE
    summary_file.unlink(missing_ok=True)
    # Through a pipe, since the definition contains keys.
    command = [sys.executable, "-m", "loadtests.run", str(folder)]
    done = subprocess.run(command, input=msgspec.json.encode(spec), check=False)
    if done.returncode or not summary_file.exists():
        raise RunError(f"the process that sends requests ended with {done.returncode}; its error is above")
    return msgspec.structs.replace(read(summary_file, Summary), machine=dataclasses.asdict(machine))


__all__ = ["SUMMARY_FILE", "RunError", "run_in_process"]
