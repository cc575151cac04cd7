"""The door of the command line: what the console script ``nnsight-engine`` and ``python -m app`` run.

vLLM starts its engine's process by spawning, which imports the parent's main module once more. So the
main module is this one, which imports nothing of weight: ``app.cli`` and what it needs, seconds of import
that an engine has no use for, are imported only in the process that runs the command. So are the commands
that talk to a server, which need neither torch nor ``app.cli`` and start at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from nnsight_engine.core.garbage_collection import uncollected

TERMINAL: Final = frozenset({"chat", "lens", "steer"})
"""Commands that talk to a server that runs."""


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
