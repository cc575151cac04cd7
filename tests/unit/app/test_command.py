"""The door of the command line, which vLLM's engine process goes through too."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nnsight_engine

# What spawning does with the main module of a console script: it runs it again under another name.
SCRIPT_AGAIN = (
    "import runpy, sys\n"
    "runpy.run_module('app.command', run_name='__mp_main__')\n"
    "print({'app.cli', 'fastapi', 'torch', 'vllm'} & set(sys.modules))\n"
)


def test_an_engine_s_process_that_spawns_from_it_imports_nothing() -> None:
    answer = subprocess.run([sys.executable, "-c", SCRIPT_AGAIN], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


@pytest.mark.parametrize("module", ["app", "app.cli"])
def test_both_modules_run_the_command_line(module: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == nnsight_engine.__version__
    refused = subprocess.run([sys.executable, "-m", module, "nothing"], capture_output=True, check=False)
    assert refused.returncode == 2
