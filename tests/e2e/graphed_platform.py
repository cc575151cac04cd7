"""A CPU on which vLLM compiles, cuts and dispatches as on a GPU, with what CUDA graphs ask of their pieces.

vLLM's CPU platform compiles a model in one piece and has no graphs. This one leaves the configuration as it
is on a GPU, and vLLM's own code does the rest: it cuts the model, compiles the pieces, wraps them in the
platform's graphs, and chooses a graph for each step. The graphs here run their piece each time, and keep the
contract of a replay: inputs at the addresses of the capture, outputs in its memory, and no tap in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.e2e.kind_platform import KindPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CAPTURE_SIZES: Final = (1, 2, 4, 8)


class GraphedCpuPlatform(KindPlatform):
    """CPUs with graphs."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Have vLLM plan for graphs."""
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """Name what a piece is wrapped in."""
        return "tests.e2e.graph_pieces.Piece"

    def get_global_graph_pool(self) -> None:
        """Return no pool: graphs here take no memory of their own."""

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """Name what runs passes over the graph; vLLM's own look for kernels of a GPU."""
        return "tests.e2e.graph_pieces.NoPasses"

    @classmethod
    def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        """Name attention of which full graphs can be made."""
        return "tests.e2e.graph_pieces.GraphedAttention"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Do what a CPU needs, and let the mode of compiling be."""
        compilation = vllm_config.compilation_config
        mode, sizes = compilation.mode, compilation.cudagraph_capture_sizes
        super().check_and_update_config(vllm_config)
        compilation.mode, compilation.cudagraph_capture_sizes = mode, sizes
        compilation.compile_sizes = []
