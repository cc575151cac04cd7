"""Traces on a server, in a process of its own that answers how long each took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

import torch

from benchmarks.process import EventPipe, events_fd
from nnsight_engine import CONFIG, save
from nnsight_engine.vllm_backend.vllm import VLLM

PROMPT: Final = "The Eiffel Tower is in the city of"
LAYER: Final = 15
SAVED_BYTES: Final = 50_000_000


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
    (name, url), fd = events_fd(sys.argv)
    CONFIG.APP.REMOTE_LOGGING = False
    model = VLLM(name, remote=url)

    def timed(kind: str, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            _KINDS[kind](model)
            seconds.append(time.perf_counter() - start)
        return seconds

    EventPipe(fd).serve(timed)


if __name__ == "__main__":
    main()
