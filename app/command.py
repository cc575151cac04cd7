"""The entry point of the command line, run by the console script ``nnsight-engine`` and by ``python -m app``.

vLLM spawns its engine process, which imports the parent's main module again. The main module is therefore
this one, which imports nothing heavy: the command line is imported only in the process that runs a command.
"""

from __future__ import annotations

import importlib
import logging

# Until vLLM has read its options, here and in the engine's process: what it says of Triton while it is
# imported helps nobody who starts a server.
logging.getLogger("vllm").setLevel(logging.ERROR)


def main() -> int:
    """Run the command line and return its exit status."""
    status: int = importlib.import_module("app.cli").main()
    return status
