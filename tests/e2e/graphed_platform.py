"""A CPU on which vLLM compiles, cuts and dispatches as on a GPU, with what CUDA graphs ask of their pieces.

vLLM's CPU platform compiles a model in one piece and has no graphs. This one leaves the configuration as it
is on a GPU, and vLLM's own code does the rest: it cuts the model, compiles the pieces, wraps them in the
platform's graphs, and chooses a graph for each step. The graphs here run their piece each time, and keep the
contract of a replay: inputs at the addresses of the capture, outputs in its memory, and no tap in between.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from nnsight_engine.vllm_backend.cpu_platform import V2CpuPlatform
from nnsight_engine.vllm_backend.taps import CONTEXT_KEY

CAPTURE_SIZES: Final = (1, 2, 4, 8)


class GraphedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Says of steps that only decode what a GPU's attention says."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class GraphedAttention(CPUAttentionBackend):
    """A CPU's attention, as part of full graphs."""

    @staticmethod
    def get_builder_cls() -> type[GraphedMetadataBuilder]:
        return GraphedMetadataBuilder


class FullGraphs:
    """Stand for a V2 runner's full graphs: run the model on what the runner has prepared for a replay."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._model = runner.model
        self._slot_mappings: dict[str, torch.Tensor] = {}
        self._attention: Any = None
        self._prepare_slots, self._prepare_attention = runner.prepare_attn, runner.model_state.prepare_attn
        runner.prepare_attn = self._noting_slots
        runner.model_state.prepare_attn = self._noting_attention
        manager = runner.cudagraph_manager
        manager.run_fullgraph, manager._graphs_captured = self._replay, True  # noqa: SLF001 - no GPU sets it

    def _noting_slots(self, batch: Any) -> Any:
        tables, slots = self._prepare_slots(batch)
        self._slot_mappings = build_slot_mappings_by_layer(slots, self._runner.kv_cache_config)
        return tables, slots

    def _noting_attention(self, *args: Any, **kwargs: Any) -> Any:
        self._attention = self._prepare_attention(*args, **kwargs)
        return self._attention

    def _replay(self, batch: Any) -> torch.Tensor:
        runner, rows = self._runner, slice(batch.num_tokens)
        with set_forward_context(
            self._attention,
            runner.vllm_config,
            num_tokens=batch.num_tokens,
            cudagraph_runtime_mode=batch.cg_mode,
            slot_mapping=self._slot_mappings,
        ):
            output: torch.Tensor = self._model(
                input_ids=runner.input_buffers.input_ids[rows],
                positions=runner.input_buffers.positions[rows],
            )
        return output


class NoPasses(PostGradPassManager):
    def __call__(self, graph: Any) -> None:
        """Do nothing."""


class Piece:
    """A piece of the compiled model, with the contract of a CUDA graph.

    Attributes:
        num_made: How many pieces there are, of all engines in this process.
        num_replayed: How often one was run again for a batch of its captured size.
    """

    num_made: ClassVar[int] = 0
    num_replayed: ClassVar[int] = 0

    def __init__(self, runnable: Any, vllm_config: Any, runtime_mode: CUDAGraphMode, **_: Any) -> None:
        del vllm_config
        Piece.num_made += 1
        self._runnable = runnable
        self._mode = runtime_mode
        self._captured: dict[Any, tuple[list[int], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
            assert CONTEXT_KEY not in context.additional_kwargs, "a full graph would pass over the taps"
        if context.cudagraph_runtime_mode is not self._mode:
            return self._runnable(*args)
        step = context.additional_kwargs.pop(CONTEXT_KEY, None)  # what taps go by
        output = self._runnable(*args)
        if step is not None:
            context.additional_kwargs[CONTEXT_KEY] = step
        addresses = [one.data_ptr() for one in args if isinstance(one, torch.Tensor)]
        captured_at, kept = self._captured.setdefault(context.batch_descriptor, (addresses, output))
        if kept is output:
            return kept
        assert addresses == captured_at, "a graph reads where its inputs were when it was captured"
        Piece.num_replayed += 1
        pairs = zip(kept, output, strict=True) if isinstance(output, (tuple, list)) else [(kept, output)]
        for old, new in pairs:
            if isinstance(new, torch.Tensor) and old is not new:
                old.copy_(new)
        return kept


class GraphedCpuPlatform(V2CpuPlatform):
    """CPUs with graphs."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "tests.e2e.graphed_platform.Piece"

    def get_global_graph_pool(self) -> None:
        """Return no pool: graphs here take no memory of their own."""

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """Name what runs passes over the graph; vLLM's own look for kernels of a GPU."""
        return "tests.e2e.graphed_platform.NoPasses"

    @classmethod
    def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        return "tests.e2e.graphed_platform.GraphedAttention"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Do what a CPU needs, and let the mode of compiling be."""
        compilation = vllm_config.compilation_config
        mode, sizes = compilation.mode, compilation.cudagraph_capture_sizes
        super().check_and_update_config(vllm_config)
        compilation.mode, compilation.cudagraph_capture_sizes = mode, sizes
        compilation.compile_sizes = []
