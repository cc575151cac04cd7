"""Taps and CUDA graphs: cuts the compiled model at its taps, and chooses the kind of graph of each step.

Hazard: replaying a CUDA graph runs kernels but no Python, so a tap inside a graph would be skipped. vLLM cuts
the compiled model at attention into pieces that it replays one by one. For steps that only decode it may also
have one full graph of the whole model. Safeguard: the model is cut at its taps too, so that they run between
the pieces. A step with interventions uses the pieces or no graph; full graphs are for steps without
interventions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from vllm.config import CUDAGraphMode

if TYPE_CHECKING:
    from vllm.config import CompilationConfig

TAP_OPS: Final = ("nnsight_engine::tap_pair", "nnsight_engine::tap_single")
"""The names of the taps' operators, see ``taps.py``."""


def cut_at_taps(config: CompilationConfig) -> bool:
    """Make the compiled model be cut at its taps, if pieces of it become graphs; return whether it will be.

    Call it before the model is compiled and after vLLM has filled in its defaults: operators given earlier
    would replace the attention operators. The list is replaced, not changed in place, since the engines of a
    process may share one.
    """
    if not (config.cudagraph_mode.has_piecewise_cudagraphs() and config.is_attention_compiled_piecewise()):
        return False
    before = config.splitting_ops or []
    config.splitting_ops = [*before, *(op for op in TAP_OPS if op not in before)]
    return True


class StepGraphs:
    """Chooses the kind of CUDA graph of each step.

    The choice depends only on data from the scheduler, which is the same on all ranks: they must choose
    alike.

    Args:
        is_cut: Whether the compiled model is cut at its taps.
    """

    def __init__(self, *, is_cut: bool) -> None:
        self._modes = {CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE} if is_cut else {CUDAGraphMode.NONE}
        self._intervening: set[str] = set()
        self._keeps_taps = False

    def begin(self, arrived: Iterable[str], finished: set[str], scheduled: Iterable[str]) -> None:
        """Begin a step.

        Args:
            arrived: The new requests with interventions.
            finished: Requests that have finished.
            scheduled: The requests of this step.
        """
        if self._intervening:
            self._intervening -= finished
        self._intervening.update(arrived)
        self._keeps_taps = not self._intervening.isdisjoint(scheduled)

    def end(self) -> None:
        """End the step; vLLM's own runs between steps, such as graph capture, may use any graph."""
        self._keeps_taps = False

    @contextlib.contextmanager
    def constraining(self, manager: Any) -> Iterator[None]:
        """Constrain, within the context, the runner's choices to graphs in which the step's taps run.

        Args:
            manager: The runner's ``CudaGraphManager``; None before it exists, when no step has a graph.
        """
        if not self._keeps_taps or manager is None:
            yield
            return
        dispatch = manager.dispatch

        def choose(num_reqs: int, num_tokens: int, _uniform: int | None, **options: Any) -> Any:
            # Only batches of decodes have full graphs beside the pieces, so treat this one as mixed.
            options["max_query_len"] = None
            chosen = dispatch(num_reqs, num_tokens, None, **options)
            # Breakable graphs replay without calling the model.
            if chosen.cg_mode in self._modes and not manager.use_breakable_cg:
                return chosen
            return dataclasses.replace(
                chosen, cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs
            )

        manager.dispatch = choose
        try:
            yield
        finally:
            del manager.dispatch
