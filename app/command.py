"""The entry point of the command line, which imports nothing heavy.

vLLM's engine process imports the parent's main module again, and must not import the command line.
"""

from __future__ import annotations

import importlib
import logging

# Until vLLM has read its options, here and in the engine's process: what it says of Triton while it is
# imported helps nobody who starts a server.
logging.getLogger("vllm").setLevel(logging.ERROR)


def main() -> int:
    status: int = importlib.import_module("app.cli").main()
    return status
