"""Interventions and CUDA graphs: cuts the compiled model at its taps, and chooses the graph of each step.

Replaying a CUDA graph runs kernels but no Python, so a tap inside a graph would be skipped. So the model is
cut at its taps as at attention; and each of vLLM's full graphs of decodes, which are for steps without
interventions, has a second one, captured while the taps launch what the step's table says (``GraphTable``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from nnsight_engine.plans.step.graph_table import GraphTable
from nnsight_engine.vllm_backend.taps import CONTEXT_KEY, rows_of

if TYPE_CHECKING:
    from vllm.config import CompilationConfig

_LOG: Final = logging.getLogger(__name__)

TAP_OPS: Final = ("nnsight_engine::tap_pair", "nnsight_engine::tap_single")
"""The names of the taps' operators, see ``taps.py``."""

Run = Callable[[], Any]
MakeTable = Callable[[int], GraphTable]
"""Returns a table for so many rows."""


def cut_at_taps(config: CompilationConfig) -> bool:
    """Have the compiled model cut at its taps, if pieces of it become graphs; return whether it will be.

    Call it before the model is compiled and after vLLM has filled in its defaults, which these would replace.
    """
    if not (config.cudagraph_mode.has_piecewise_cudagraphs() and config.is_attention_compiled_piecewise()):
        return False
    before = config.splitting_ops or []
    config.splitting_ops = [*before, *(op for op in TAP_OPS if op not in before)]
    return True


class CapturedTaps:
    """Stands for a step's operations while a graph is captured: each tap launches its part of a table."""

    def __init__(self, table: GraphTable) -> None:
        self._table = table

    def is_busy(self, tap: int) -> bool:
        return self._table.has(tap)

    def reach_tap(self, tap: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._table.run(tap, rows_of(hidden), None if residual is None else rows_of(residual))


class InterveningGraphs:
    """The full graphs of steps with interventions, one for each size that vLLM has one of decodes for."""

    def __init__(self, vllm_graphs: ModelCudaGraphManager, make_table: MakeTable) -> None:
        """Prepare graphs of the sizes of vLLM's own, with a table for the rows of the largest one."""
        self.manager = ModelCudaGraphManager(
            vllm_graphs.vllm_config,
            vllm_graphs.device,
            CUDAGraphMode.FULL_DECODE_ONLY,
            vllm_graphs.decode_query_len,
            lora_capture_cases=vllm_graphs.lora_capture_cases,
            varlen_decode=vllm_graphs.varlen_decode,
        )
        # One of them runs at a time.
        self.manager.hidden_states = vllm_graphs.hidden_states
        self.manager.aux_hidden_states = vllm_graphs.aux_hidden_states
        self.manager.intermediate_tensors = vllm_graphs.intermediate_tensors
        sizes = self.manager.compilation_config.cudagraph_capture_sizes or [0]
        # A size is rounded up to whole requests.
        self.table = make_table(max(sizes) + vllm_graphs.decode_query_len)

    def capture(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Capture a graph of each size, in which taps launch what the table says; log the time and memory."""
        taps = CapturedTaps(self.table)

        def intervening(*model_args: Any, **model_kwargs: Any) -> Any:
            get_forward_context().additional_kwargs[CONTEXT_KEY] = taps
            return model(*model_args, **model_kwargs)

        began, free = time.monotonic(), _free_bytes()
        description = "Capturing CUDA graphs with interventions"
        self.manager.capture(intervening, *args, **kwargs, progress_bar_desc=description)
        _LOG.info(
            "Captured CUDA graphs of decode steps with interventions, of %s tokens, in %.0f s, %.2f GiB",
            ", ".join(map(str, self.manager.captured_token_counts())),
            time.monotonic() - began,
            (free - _free_bytes() + sum(tensor.nbytes for tensor in self.table.memory)) / 2**30,
        )


def _free_bytes() -> int:
    return 0 if current_platform.is_cpu() else int(torch.accelerator.get_memory_info()[0])


class StepGraphs:
    """Chooses the CUDA graph of each step, by data from the scheduler only: all ranks must choose alike."""

    def __init__(self, *, is_cut: bool) -> None:
        """Allow piecewise graphs for steps with interventions only if the model is cut at its taps."""
        self._modes = {CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE} if is_cut else {CUDAGraphMode.NONE}
        self.make_table: MakeTable | None = None
        self._intervening: dict[str, int | None] = {}  # the values of ``arrived``, see ``begin_step``
        self._scheduled: Collection[str] = ()
        self._keeps_taps = False
        self.captured: InterveningGraphs | None = None

    def captures(self, mode: CUDAGraphMode) -> bool:
        return self.make_table is not None and mode.decode_mode() is CUDAGraphMode.FULL

    @contextlib.contextmanager
    def capturing(self, manager: ModelCudaGraphManager) -> Iterator[None]:
        """Have vLLM's capture of its graphs also capture those with interventions."""
        make_table, capture = self.make_table, manager.capture
        if make_table is None or not self.captures(manager.cudagraph_mode):
            yield
            return

        def both(model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            capture(model, *args, **kwargs)
            graphs = InterveningGraphs(manager, make_table)
            graphs.capture(model, *args, **kwargs)
            self.captured = graphs

        manager.capture = both
        try:
            yield
        finally:
            del manager.capture

    def begin_step(
        self, arrived: Mapping[str, int | None], finished: Iterable[str], scheduled: Collection[str]
    ) -> None:
        """Begin a step.

        ``arrived``: the most instructions of each new request at a generated position; None for a request
        with work that no full graph can do.
        """
        if self._intervening:
            for request_id in finished:
                self._intervening.pop(request_id, None)
        self._intervening.update(arrived)
        self._scheduled = scheduled
        self._keeps_taps = not self._intervening.keys().isdisjoint(scheduled)

    def end_step(self) -> None:
        """End the step; vLLM's own runs between steps, such as graph capture, may use any graph."""
        self._keeps_taps = False

    @contextlib.contextmanager
    def constraining(self, manager: Any, replay: Callable[[GraphTable, Run], Any]) -> Iterator[None]:
        """Choose graphs in which the step's taps run; ``manager`` is None before it exists.

        ``replay`` runs a full graph with interventions, given its table and a call that replays it.
        """
        if not self._keeps_taps or manager is None:
            yield
            return
        dispatch, captured = manager.dispatch, self._fitting()

        def choose(num_reqs: int, num_tokens: int, uniform: int | None, **options: Any) -> Any:
            """In place of the manager's ``dispatch``: choose the step's graph, or none."""
            # A step with tokens of a prompt has no maximum, not even if it is run as a decode.
            if captured is not None and options.get("max_query_len") is not None:
                chosen = captured.manager.dispatch(num_reqs, num_tokens, uniform, **options)
                if chosen.cg_mode is CUDAGraphMode.FULL:
                    return chosen
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
        if captured is not None:
            graphs, table = captured.manager, captured.table
            manager.run_fullgraph = lambda batch: replay(table, lambda: graphs.run_fullgraph(batch))
        try:
            yield
        finally:
            del manager.dispatch
            if captured is not None:
                del manager.run_fullgraph

    def _fitting(self) -> InterveningGraphs | None:
        """Return the graphs with interventions if the step's operations fit into their table, else None."""
        if self.captured is None:
            return None
        instruction_counts = [
            self._intervening[name] for name in self._scheduled if name in self._intervening
        ]
        total = 0
        for count in instruction_counts:
            if count is None:
                return None
            total += count
        num_rows = self.captured.manager.decode_query_len
        return self.captured if total * num_rows <= self.captured.table.max_instructions else None
