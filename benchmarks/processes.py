"""Fresh processes to measure in, with the environment that vLLM reads when it is imported.

A child runs one module of this package and reports events, one JSON object per line, through a
pipe of its own. What it prints goes into a temporary file and is shown only when it fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

Event = dict[str, Any]

# Where 4 KiB pages happen to lie makes one of two equal engines in a process up to 15 % slower than
# the other; with huge pages they differ by less than 1 %. The control shows it.
HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "KINETO_LOG_LEVEL": "99",
    # Both engines of a comparison live in one process, driven step by step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # GiB of KV cache; no core is kept for anything else.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Interventions are written for the V1 runner; plain vLLM gets the same one.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

_SHOWN_OUTPUT_BYTES: Final = 8000


class ChildError(Exception):
    """A child ended with an error; the message has the end of what it printed."""


def run_child(module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Event]:
    """Run ``python -m module arguments --events-fd N`` and yield its events as they come.

    Args:
        module: Module to run.
        arguments: Its arguments.
        variables: Environment variables beside those that every measured engine gets.

    Raises:
        ChildError: It ended with a status other than 0.
    """
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as printed, os.fdopen(read_fd, encoding="utf-8") as events:
        command = [sys.executable, "-m", module, *arguments, "--events-fd", str(write_fd)]
        child = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **variables},
            pass_fds=(write_fd,),
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        os.close(write_fd)
        try:
            for line in events:
                yield json.loads(line)
        except BaseException:
            child.terminate()
            raise
        finally:
            status = child.wait()
        if status:
            raise ChildError(f"{module} ended with status {status}; the end of its output:\n{_tail(printed)}")


class EventPipe:
    """The child's end.

    Args:
        fd: The descriptor that ``--events-fd`` names.
    """

    def __init__(self, fd: int) -> None:
        """Take over the descriptor."""
        self._stream: TextIO = os.fdopen(fd, "w", encoding="utf-8", buffering=1)

    def send(self, event: Event) -> None:
        """Report one event."""
        self._stream.write(json.dumps(event) + "\n")


def _tail(printed: Any) -> str:
    printed.seek(0, os.SEEK_END)
    printed.seek(max(0, printed.tell() - _SHOWN_OUTPUT_BYTES))
    text: str = printed.read().decode(errors="replace")
    return text
