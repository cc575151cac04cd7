"""The entry point of the command line, run by the console script ``nnsight-engine`` and by ``python -m app``.

vLLM spawns its engine process, which imports the parent's main module again. The main module is therefore
this one, which imports nothing heavy: ``app.cli`` and its dependencies take seconds to import, are of no use
to an engine, and are imported only in the process that runs the command. The commands that talk to a running
server are also imported lazily; they need neither torch nor ``app.cli`` and start at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from nnsight_engine.core.garbage_collection import uncollected

TERMINAL: Final = frozenset({"chat", "lens", "steer"})
"""Commands that talk to a running server."""


def main() -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:]
    if TERMINAL.intersection(arguments[:1]):
        return run_terminal(arguments)
    if arguments[:1] == ["serve"]:
        importlib.import_module("app.early_engine").begin_early(arguments[1:])
    with uncollected():
        cli = importlib.import_module("app.cli")
    status: int = cli.main()
    return status


def run_terminal(arguments: list[str]) -> int:
    """Run one of ``TERMINAL`` and return its exit status."""
    status: int = importlib.import_module("app.terminal.commands").run(arguments)
    return status
