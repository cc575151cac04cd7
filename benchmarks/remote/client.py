"""The client of the benchmark, in a process of its own: traces on the server, and says how long each took.

Reads one JSON object per line from standard input, ``{"kind": "small", "count": 10}``, and answers each with
a line of seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Final

import torch

from benchmarks.remote.blocks import LAYER, PROMPT, SAVED_BYTES
from nnsight_engine import CONFIG, save
from nnsight_engine.vllm_backend.vllm import VLLM


def small(model: VLLM) -> None:
    """Save one layer's last token."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        hidden = save(model.layers[LAYER].output[-1])
    assert hidden.shape[-1] > 1  # noqa: S101 - a benchmark of nothing would be fast


def large(model: VLLM) -> None:
    """Compute numbers of ``SAVED_BYTES``, and save them."""
    num_numbers = SAVED_BYTES // 4
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        numbers = save(torch.ones(num_numbers))
    assert numbers.nbytes == SAVED_BYTES  # noqa: S101 - as above


def unsaved(model: VLLM) -> None:
    """Compute the same numbers, and save the last one."""
    num_numbers = SAVED_BYTES // 4
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        number = save(torch.ones(num_numbers)[-1].clone())
    assert number == 1  # noqa: S101 - as above


_KINDS: Final[dict[str, Callable[[VLLM], None]]] = {"small": small, "large": large, "unsaved": unsaved}


def main() -> None:
    """Answer until standard input ends."""
    model_name, url = sys.argv[1:]
    CONFIG.APP.REMOTE_LOGGING = False
    model = VLLM(model_name, remote=url)
    for line in sys.stdin:
        command = json.loads(line)
        seconds = []
        for _ in range(command["count"]):
            start = time.perf_counter()
            _KINDS[command["kind"]](model)
            seconds.append(time.perf_counter() - start)
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
