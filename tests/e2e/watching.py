"""A debug mode: everything that reads the model's tensors is watched, and must leave them as they were.

Each tensor that a read is given, at taps, hooks, norms, attention, logits and for blocks, is compared bit
by bit before and after. Nothing is raised where the engine would take it for a request's failure: what has
changed is recorded in ``Watch.changed``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nnsight_engine.core.trees import tensors
from nnsight_engine.plans.step.plan import KernelGroup, LogitsRows, SiteWork
from nnsight_engine.plans.step.table import Segment
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


class Watch:
    """What reads have changed, in words, and how many tensors were compared."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.num_compared = 0

    @contextlib.contextmanager
    def over(self, values: Sequence[torch.Tensor | None], where: str) -> Iterator[None]:
        """Compare tensors before and after the block."""
        watched = [value for value in values if value is not None]
        with _disable_current_modes():  # a mode that counts operators is to see the model's alone
            before = [value.clone() for value in watched]
        yield
        self.num_compared += len(watched)
        with _disable_current_modes():
            for number, (old, new) in enumerate(zip(before, watched, strict=True)):
                if not torch.equal(_bits(old), _bits(new)):
                    self.changed.append(f"{where}: tensor {number}, {tuple(new.shape)} of {new.dtype}")


@contextlib.contextmanager
def watched_reads() -> Iterator[Watch]:
    """Watch all engines of this process."""
    watch = Watch()

    def group(run: Callable[..., None], self: SiteWork, hidden: Any, residual: Any) -> None:
        reads = not any(member.writes for member in self.members)
        where = ", ".join(sorted({str(member.active.op.kind) for member in self.members}))
        with watch.over((hidden, residual) if reads else (), where):
            run(self, hidden, residual)

    def offer(run: Callable[..., Any], self: TraceDispatcher, provider: str, number: Any, value: Any) -> Any:
        # Also what a block edits is put into new tensors, so the model's own never change here.
        with watch.over(list(tensors(value)), f"blocks at {provider}"):
            return run(self, provider, number, value)

    def lens(run: Callable[..., Any], self: ModelPoints, residual: torch.Tensor) -> Any:
        with watch.over((residual,), "a lens"):
            return run(self, residual)

    def logits(run: Callable[..., Any], self: LogitsRows, sampled: Any, hidden: Any, compute: Any) -> Any:
        with watch.over((sampled, hidden), "rows of logits"):
            return run(self, sampled, hidden, compute)

    with contextlib.ExitStack() as stack:
        for owner, name, watched in (
            (KernelGroup, "run", group),
            (Segment, "run", group),
            (TraceDispatcher, "offer", offer),
            (ModelPoints, "lens_logits", lens),
            (LogitsRows, "gather", logits),
        ):
            stack.enter_context(mock.patch.object(owner, name, _around(getattr(owner, name), watched)))
        yield watch


def _around(original: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return watched(original, *args)

    return run


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content as bytes, in which any two NaNs differ that do."""
    return tensor.contiguous().flatten().view(torch.uint8)
