"""nnsight's vLLM model, which starts where there is a GPU; no tasks are written for it there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.tasks import ENGINE_ARGUMENTS, NotOfferedError, Size


def works(library: Any, path: Path) -> dict[Size, Any]:
    """Start the engine, so that the table has the reason why it does not.

    Raises:
        NotOfferedError: It has started.
    """
    # In this process: from another one vLLM reports only that it has failed, not why.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On machines without an accelerator vLLM's own worker does this too; without it the start ends earlier,
    # with "Cannot access accelerator device when none is available".
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
    library.VLLM(str(path), dispatch=True, enforce_eager=True, **ENGINE_ARGUMENTS)
    raise NotOfferedError("it has started, but its tasks are written for machines without a GPU only")
