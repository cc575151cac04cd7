"""Taps and CUDA graphs: what is replayed, and which steps are.

A CUDA graph replays kernels and no Python, so a tap inside of one would be passed over. vLLM cuts the
compiled model at attention into pieces that it replays one by one, and for steps that only decode it may have
one full graph of the whole. Here the model is cut at its taps too: they run between the pieces, and a step in
which somebody intervenes gets pieces or no graphs. Full graphs are for steps in which nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from vllm.config import CUDAGraphMode

if TYPE_CHECKING:
    from vllm.config import CompilationConfig

TAP_OPS: Final = ("nnsight_engine::tap_pair", "nnsight_engine::tap_single")
"""The taps' operators, see ``taps.py``."""


def cut_at_taps(config: CompilationConfig) -> bool:
    """Have the compiled model cut at its taps, if pieces of it become graphs; returns whether it will be.

    Call it before the model is compiled and after vLLM has filled in its defaults: operators given before
    would take the place of attention's. The list is a new one, since engines of a process may share theirs.
    """
    if not (config.cudagraph_mode.has_piecewise_cudagraphs() and config.is_attention_compiled_piecewise()):
        return False
    before = config.splitting_ops or []
    config.splitting_ops = [*before, *(op for op in TAP_OPS if op not in before)]
    return True


class StepGraphs:
    """Chooses the kind of graph of each step.

    What it goes by comes from the scheduler, and is the same on all ranks: they must choose alike.

    Args:
        is_cut: Whether the taps lie between the pieces of the compiled model.
    """

    def __init__(self, *, is_cut: bool) -> None:
        """Start without requests."""
        self._modes = {CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE} if is_cut else {CUDAGraphMode.NONE}
        self._intervening: set[str] = set()
        self._keeps_taps = False

    def begin(self, arrived: Iterable[str], finished: set[str], scheduled: Iterable[str]) -> None:
        """Begin a step.

        Args:
            arrived: The new requests that intervene.
            finished: Requests that take part in no step any more.
            scheduled: The requests of this step.
        """
        if self._intervening:
            self._intervening -= finished
        self._intervening.update(arrived)
        self._keeps_taps = not self._intervening.isdisjoint(scheduled)

    def end(self) -> None:
        """End the step; vLLM's own runs between steps, captures for one, may use any graph."""
        self._keeps_taps = False

    def choose(self, decide: Callable[..., tuple[Any, ...]], options: dict[str, Any]) -> tuple[Any, ...]:
        """Return what vLLM decides of a batch, the kind of its graph first: one that leaves taps their turn.

        Args:
            decide: vLLM's ``_determine_batch_execution_and_padding``.
            options: Its arguments.
        """
        if not self._keeps_taps:
            return decide(**options)
        # Only decoding batches have full graphs beside pieces, so this is to pass for a mixed one.
        decided = decide(**{**options, "force_uniform_decode": False})
        return decided if decided[0] in self._modes else decide(**{**options, "force_eager": True})
