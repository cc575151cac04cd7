"""nnsight's vLLM model, which starts where there is a GPU; no tasks are written for it there."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from benchmarks.peers.sides.serving import ENGINE_ARGUMENTS
from benchmarks.peers.tasks import NotOfferedError
from benchmarks.tracing.timing import Sampler


class NoWork:
    """Does nothing."""

    def prepare(self, _number: int) -> tuple[Sampler, list[torch.Tensor]]:
        """Refuse.

        Raises:
            NotOfferedError: Always.
        """
        raise NotOfferedError("it has started, but its tasks are written for machines without a GPU only")


def side(path: Path) -> NoWork:
    """Start the engine, so that the table has the reason why it does not."""
    # In this process: from another one vLLM tells only that it has failed, not why.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On machines without an accelerator vLLM's own worker does this too; without it the start ends earlier,
    # with "Cannot access accelerator device when none is available".
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
    library = importlib.import_module("nnsight.modeling.vllm")
    library.VLLM(str(path), dispatch=True, enforce_eager=True, **ENGINE_ARGUMENTS)
    return NoWork()
