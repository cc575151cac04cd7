"""The door of the command line: what the console script ``nnsight-engine`` and ``python -m app`` run.

vLLM starts its engine's process by spawning, which imports the parent's main module once more. So the
main module is this one, which imports nothing: ``app.cli`` and what it needs, seconds of import that an
engine has no use for, are imported only in the process that runs the command.
"""

from __future__ import annotations

import importlib


def main() -> int:
    """Run the command line and return its exit status."""
    status: int = importlib.import_module("app.cli").main()
    return status
