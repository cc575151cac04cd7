"""The entry point of the command line, run by the console script ``nnsight-engine`` and by ``python -m app``.

vLLM spawns its engine process, which imports the parent's main module again. The main module is therefore
this one, which imports nothing heavy: the command line is imported only in the process that runs a command.
"""

from __future__ import annotations

import importlib
import sys


def main() -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        importlib.import_module("app.early_engine").begin_early(arguments[1:])
    status: int = importlib.import_module("app.cli").main(arguments)
    return status
