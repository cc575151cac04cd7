"""What ``GraphedCpuPlatform`` has vLLM use: for CUDA graphs, for passes, and for attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder

from nnsight_engine.vllm_backend.taps import CONTEXT_KEY


class GraphedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Says of steps that only decode what a GPU's attention says."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class GraphedAttention(CPUAttentionBackend):
    """A CPU's attention, as part of full graphs."""

    @staticmethod
    def get_builder_cls() -> type[GraphedMetadataBuilder]:
        """Return what makes its metadata."""
        return GraphedMetadataBuilder


class NoPasses(PostGradPassManager):
    """Leaves the graph as it is."""

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
        """Wrap a piece; nothing is captured yet."""
        del vllm_config
        Piece.num_made += 1
        self._runnable = runnable
        self._mode = runtime_mode
        self._captured: dict[Any, tuple[list[int], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the piece, and put what it returns where the captured run put it."""
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
